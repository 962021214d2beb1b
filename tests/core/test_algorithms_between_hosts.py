"""Operations of ranks on several hosts with equally and differently many ranks, by every algorithm between hosts."""

import os
import random
import signal
import threading

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import errors_of_survivors, internal
from tests.harness.support import NO_LIMITS, seed

pytest_plugins = ["tests.harness.jobs"]

STEPS = 12  # so many that a plan runs the last ones


def check_operations():
    rank, size = hvd.rank(), hvd.size()
    for step in range(STEPS):
        for count in (3, 5_000, 700_001 if step == STEPS - 1 else 1):
            values = np.arange(count, dtype=np.float32) % 7 + rank
            total = (np.arange(count, dtype=np.float32) % 7) * size + sum(range(size))
            assert np.array_equal(hvd.allreduce(values, op=hvd.Sum, name=f"sum{count}"), total)
            for root in {0, size // 2, size - 1}:
                got = hvd.broadcast(values, root, name=f"broadcast{count}.{root}")
                assert np.array_equal(got, values - rank + root)
            # Not every rank gets a row if there are fewer rows than ranks.
            got = hvd.reducescatter(values, op=hvd.Sum, name=f"scatter{count}")
            assert np.array_equal(got, np.array_split(total, size)[rank])
            rows = [(r * 3 + step) % 4 * count for r in range(size)]
            got = hvd.allgather(np.full((rows[rank], 2), rank, np.int32), name=f"gather{count}")
            assert np.array_equal(got[:, 1], np.repeat(np.arange(size), rows))


def check_burst():
    """Allgathers that are submitted together."""
    rank, size = hvd.rank(), hvd.size()
    for step in range(STEPS):
        rows = [[(r + i + step) % 3 for r in range(size)] for i in range(20)]
        handles = [
            hvd.allgather_async(np.full(rows[i][rank], 100 * i + rank, np.int64), name=f"burst{i}")
            for i in range(20)
        ]
        for i, handle in enumerate(handles):
            expected = np.repeat(100 * i + np.arange(size), rows[i])
            assert np.array_equal(hvd.synchronize(handle), expected)


@pytest.mark.parametrize("algorithm", [None, "hierarchical", "bruck", "halving", "ring"])
@pytest.mark.parametrize("hosts", ["abba", "aabab", "abccc"])
def test_operations_between_hosts(pool, hosts, algorithm):
    env = {"HOROPLUG_ALGORITHM": algorithm} if algorithm else {}
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        job.run(check_operations)
        job.run(check_burst)


def die_in_operations(victim, key):
    """Die at a random moment in a series of large and small operations."""
    if hvd.rank() == victim:
        moment = random.Random(key).uniform(0.0, 0.3)
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        for count in (5, 600_000):
            data = np.ones(count, np.float32)
            hvd.allreduce(data, name=f"sum{count}")
            hvd.allgather(data, name=f"gather{count}")
            hvd.reducescatter(data, name=f"scatter{count}")
            hvd.broadcast(data, 1, name=f"broadcast{count}")


@pytest.mark.parametrize("algorithm", [None, "hierarchical", "bruck", "halving"])
@pytest.mark.parametrize("hosts", ["abba", "aab"])
@pytest.mark.short("aab-None", failure=True)
def test_rank_killed_between_hosts_is_named(pool, hosts, algorithm):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    env = NO_LIMITS | ({"HOROPLUG_ALGORITHM": algorithm} if algorithm else {})
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        internal(errors_of_survivors(job.outcomes(die_in_operations, victim, key), victim))
