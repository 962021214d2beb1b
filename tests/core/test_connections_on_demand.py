"""Jobs in which a rank is connected at the start with its host and with its neighbours on other hosts only.

HOROPLUG_CONNECT_ALL=0 makes small jobs start like large ones. Which ranks are neighbours:
horoplug/rendezvous/connections/neighbours.py."""

import os
import random
import signal
import threading

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import errors_of_survivors, internal
from tests.harness.limits import scaled
from tests.harness.on_demand import ON_DEMAND, strangers
from tests.harness.support import (
    NO_LIMITS,
    Ranks,
    resources,
    seed,
    until,
    wait_until_stopped,
)

pytest_plugins = ["tests.harness.jobs"]

HOSTS = ["aabbccd", "abcabcab", "abcdefghijk"]


def descriptors(kind):
    """The number of descriptors of this process whose target begins with ``kind``."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith(kind)
        except FileNotFoundError:  # the descriptor of the listing
            continue
    return count


def sockets():
    return descriptors("socket:")


def eventfds():
    return descriptors("anon_inode:[eventfd]")


def exchange(key):
    """Random operations whose partners are any ranks. Returns how many sockets they have added."""
    rank, size, before = hvd.rank(), hvd.size(), sockets()
    draw = random.Random(key)  # the same on all ranks
    for step in range(30):
        kind = draw.choice(["alltoall", "pair", "sum", "set", "gather", "object"])
        name = f"{kind}.{step}"
        if kind == "alltoall":
            sent = np.arange(size, dtype=np.float32) + 100 * rank
            received, _ = hvd.alltoall(sent, splits=[1] * size, name=name)
            assert received.tolist() == [100 * other + rank for other in range(size)]
        elif kind == "pair":
            source, to = draw.sample(range(size), 2)
            count = draw.choice([1, 1000, 300_000])
            if rank == source:
                hvd.send(np.full(count, step, np.float32), to)
            elif rank == to:
                assert (hvd.recv(np.empty(count, np.float32), source) == step).all()
        elif kind == "sum":
            count = draw.choice([1, 3, 1000, 300_000])
            assert (hvd.allreduce(np.ones(count), op=hvd.Sum, name=name) == size).all()
        elif kind == "set":
            members = sorted(draw.sample(range(size), draw.randint(2, size - 1)))
            some = hvd.add_process_set(members)
            if some.included():
                total = hvd.allreduce(np.ones(7), op=hvd.Sum, name=name, process_set=some)
                assert (total == len(members)).all()
            hvd.remove_process_set(some)
        elif kind == "gather":
            rows = hvd.allgather(np.full((rank % 3, 2), rank), name=name)
            assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r % 3)]
        else:
            root = draw.randrange(size)
            assert hvd.broadcast_object([rank], root_rank=root, name=name) == [root]
    hvd.barrier()  # a rank that shut down now would end the operations of the others
    return sockets() - before


@pytest.mark.parametrize(
    "env", [{}, {"HOROPLUG_NUM_STREAMS": "3", "HOROPLUG_ENCRYPT": "1"}], ids=["plain", "encrypted"]
)
@pytest.mark.parametrize("hosts", HOSTS)
def test_operations_between_any_ranks(pool, hosts, env):
    key = seed()
    assert strangers(hosts)
    with pool.ranks(len(hosts), hosts=hosts, env=ON_DEMAND | env) as job:
        assert any(job.run(exchange, key))
        job.run(exchange, key + 1)


def sums(count):
    before = sockets()
    for step in range(20):
        hvd.allreduce(np.ones(count), name=f"sum.{step % 4}")
    return sockets() - before


def test_rank_on_another_host_costs_no_other_descriptor_than_its_connections(pool):
    counts = []
    for hosts in ("abc", "abcdefgh"):
        with pool.ranks(len(hosts), hosts=hosts) as job:
            counts.append(job.run(eventfds)[:3])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_ring_and_doubling_need_no_further_connection(pool, count):
    hosts = "abcdefghijk"
    env = ON_DEMAND | {"HOROPLUG_ALGORITHM": "ring" if count > 1000 else "doubling"}
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        assert set(job.run(sums, count)) == {0}


def die_in_an_allreduce(victim, key):
    if hvd.rank() == victim:
        delay = random.Random(key).uniform(0, 0.2)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        hvd.allreduce(np.ones(100_000, np.float32), name="waiting")


def die_before_a_message(victim, _):
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.alltoall(np.ones(hvd.size()), splits=[1] * hvd.size(), name="waiting")
    hvd.barrier()


@pytest.mark.parametrize("phase", [die_in_an_allreduce, die_before_a_message])
@pytest.mark.parametrize("hosts", HOSTS)
def test_killed_rank_is_named_by_ranks_without_a_connection_to_it(pool, hosts, phase):
    key = seed()
    victim, _ = random.Random(key).choice(strangers(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS | ON_DEMAND) as job:
        internal(errors_of_survivors(job.outcomes(phase, victim, key), victim))


def one_sum(_):
    hvd.allreduce(np.ones(100_000, np.float32), name="waiting")


def to_all(_):
    hvd.alltoall(np.ones(hvd.size()), splits=[1] * hvd.size(), name="waiting")


def message(pair):
    """The first rank of the pair sends to the second one, and all wait for both."""
    if hvd.rank() == pair[0]:
        hvd.send(np.ones(3), pair[1])
    hvd.barrier()


def wait_for_a_stopped_rank(operation, pair):
    hvd.barrier()
    if hvd.rank() == pair[1]:
        os.kill(os.getpid(), signal.SIGSTOP)
    operation(pair)


@pytest.mark.parametrize("operation", [one_sum, to_all, message])
@pytest.mark.parametrize("hosts", ["aabbccd", "abcdefghijk"])
def test_stopped_rank_is_named_by_ranks_without_a_connection_to_it(pool, hosts, operation):
    pair = random.Random(seed()).choice(strangers(hosts))
    limit = f"{scaled(6):.1f}"
    env = ON_DEMAND | {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": limit,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
    }
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        job.start(wait_for_a_stopped_rank, operation, pair)
        stopped = job.workers[pair[1]]
        wait_until_stopped(stopped.process.pid)
        others = Ranks([worker for worker in job.workers if worker is not stopped])
        try:
            internal(others.collect(60), f"rank {pair[1]}")
        finally:
            stopped.kill()


def start_again(key, rounds):
    """Shut down and start again, with and without connections that were made on demand."""
    hvd.shutdown()
    first = resources()[:2]  # the numbers of descriptors and threads
    for number in range(rounds):
        hvd.init()
        if number % 2:
            exchange(key + number)
        hvd.shutdown()
        # The kernel lists a thread that has ended for a moment.
        until(lambda: all(now <= then for now, then in zip(resources(), first, strict=False)))
    hvd.init()


def test_starting_again_leaves_no_descriptor_and_no_thread(pool):
    hosts = "aabbccd"
    with pool.ranks(len(hosts), hosts=hosts, env=ON_DEMAND) as job:
        job.run(start_again, seed(), 5)


def init_with_other_settings(odd):
    os.environ["HOROVOD_FUSION_THRESHOLD"] = (
        "17" if int(os.environ["HOROVOD_RANK"]) == odd else "19"
    )
    hvd.init()


def test_different_settings_fail_init_on_all_ranks(pool):
    hosts = "abcdefghijk"
    odd = random.Random(seed()).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=ON_DEMAND, init=False) as job:
        for outcome in job.outcomes(init_with_other_settings, odd):
            assert outcome.kind == "ValueError"
            assert "fusion threshold" in outcome.message
            assert f"rank {odd}" in outcome.message


def init_with_other_limit(odd):
    if int(os.environ["HOROVOD_RANK"]) == odd:
        os.environ["HOROPLUG_CONNECT_ALL"] = "5"
    hvd.init()


def test_different_limits_fail_init_on_all_ranks(pool):
    hosts = "abc"
    with pool.ranks(len(hosts), hosts=hosts, env=ON_DEMAND, init=False) as job:
        for outcome in job.outcomes(init_with_other_limit, 1):
            assert "HOROPLUG_CONNECT_ALL" in outcome.message
