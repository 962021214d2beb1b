"""send and recv on NumPy arrays."""

import os
import random
import signal
import threading

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import errors_of_survivors, internal, refused
from tests.harness.checks.rooted import check_pairs
from tests.harness.support import NO_LIMITS, ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab", "aab", "abab")


def check_in_sets(key):
    check_pairs(key)
    if hvd.size() == 1:
        return
    members = sorted(random.Random(key).sample(range(hvd.size()), hvd.size() - 1))
    some = hvd.add_process_set(members)
    check_pairs(key + 1, some, members)
    check_pairs(key + 2)
    hvd.remove_process_set(some)


def test_many_sends_and_recvs_in_flight(ranks):
    ranks.run(check_in_sets, seed())


def check_blocking():
    """A token is passed around the ranks and grows with each hop."""
    size, rank = hvd.size(), hvd.rank()
    token = np.zeros((2, 3))
    for step in range(20):
        if rank == 0:
            handle = hvd.send_async(token + 1, 1 % size, step)
        assert hvd.recv(token, (rank - 1) % size, step) is token
        if rank == 0:
            hvd.synchronize(handle)
        else:
            assert hvd.send(token + 1, (rank + 1) % size, tag=step) is None
    assert (token == (20 * size if rank == 0 else 19 * size + rank)).all()


def test_blocking_send_and_recv(ranks):
    ranks.run(check_blocking)


def check_refusals():
    data = np.ones(4)
    refused(ValueError, "rank 9 does not exist", lambda: hvd.send(data, 9))
    refused(ValueError, "tags are 0 or more", lambda: hvd.send_async(data, 0, -1))
    data.setflags(write=False)
    refused(ValueError, "", lambda: hvd.recv(data, 0))


def test_invalid_send_and_recv_calls_are_refused(ranks):
    ranks.run(check_refusals)


def mismatch():
    if hvd.rank() == 0:
        hvd.send(np.ones(3, np.float32), 1, 4)
    else:
        hvd.recv(np.ones(5), 0, 4)


def test_mismatched_send_and_recv_are_an_error_on_both_ranks(pool):
    with pool.ranks(2) as job:
        internal(
            job.outcomes(mismatch),
            "send from rank 0 to rank 1, tag 4",
            "float32 on rank 0 but float64 on rank 1",
            "[3] on rank 0 but [5] on rank 1",
        )
        job.run(check_blocking)


def wait_for_each_other():
    hvd.recv(np.ones(5), 1 - hvd.rank(), hvd.rank())


def test_deadlock_of_recvs_names_both_ranks(pool):
    env = {"HOROVOD_DEADLOCK_TIME_SECONDS": "1"}
    with pool.ranks(2, env=env) as job:
        internal(
            job.outcomes(wait_for_each_other),
            "deadlock",
            "from rank 1, tag 0",
            "from rank 0, tag 1",
        )
        job.run(check_blocking)


def die(victim, key):
    """Die at a random moment in a series of large transfers."""
    size, rank = hvd.size(), hvd.rank()
    if rank == victim:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        threading.Timer(random.Random(key).uniform(0.0, 0.3), kill).start()
    data = np.ones(1_000_000, np.float32)
    while True:
        handle = hvd.send_async(data, (rank + 1) % size)
        hvd.recv(np.empty_like(data), (rank - 1) % size)
        hvd.synchronize(handle)


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_killed_rank_is_named_by_the_survivors(pool, hosts):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        for outcome in errors_of_survivors(job.outcomes(die, victim, key), victim):
            assert "recv" in outcome.message or "send" in outcome.message
