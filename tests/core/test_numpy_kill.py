"""kill -9 of one rank in every phase: the other ranks notice its death and raise an error that names it.

All timeouts of the product are longer than a test (NO_LIMITS), so that no timeout can be the cause of the error."""

import os
import random
import select
import signal
import threading

import numpy as np
import pytest

import horoplug as hvd
from tests.harness import support
from tests.harness.checks.errors import errors_of_survivors, internal
from tests.harness.limits import scaled
from tests.harness.support import NO_LIMITS, seed

pytest_plugins = ["tests.harness.jobs"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_idle(victim, _):
    if hvd.rank() == victim:
        die()
    hvd.allreduce(np.ones(10), name="waiting")


def die_after_submitting(victim, _):
    handle = hvd.allreduce_async(np.ones(100_000), name="waiting")
    if hvd.rank() == victim:
        die()
    while True:
        hvd.synchronize(handle)
        handle = hvd.allreduce_async(np.ones(100_000), name="waiting")


def die_under_load(victim, key):
    """Die at a random moment in a series of large transfers."""
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.3), die).start()
    data = np.ones(2_000_000, np.float32)
    while True:
        hvd.allreduce(data, name="waiting")


def die_during_small_ones(victim, key):
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.2), die).start()
    while True:
        hvd.synchronize(hvd.allgather_async(np.ones(3), name="waiting"))


def die_while_plans_break(victim, key):
    """Die while plans are repeatedly installed by equal steps and uninstalled by new operations."""
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.3), die).start()
    names = ["waiting", "new"][:: 1 if hvd.rank() == 0 else -1]
    while True:
        for _ in range(40):
            hvd.allreduce(np.ones(100), name="waiting")
        for handle in [hvd.allreduce_async(np.ones(100), name=name) for name in names]:
            hvd.synchronize(handle)


def die_before_barrier(victim, _):
    if hvd.rank() == victim:
        die()
    hvd.barrier()


def die_while_others_compute(victim, _):
    """Die while no rank waits: the next operation fails."""
    if hvd.rank() == victim:
        die()
    while not _gone(victim):
        pass
    hvd.broadcast(np.ones(3), 0, name="waiting")


def die_before_joining(victim, _):
    """Die while the others wait in join()."""
    if hvd.rank() == victim:
        die()
    hvd.join()


def die_in_a_set(victim, key):
    """Die during a reduction in a process set of two; ranks outside of the set get the error, too."""
    other = (victim + 1) % hvd.size()
    both = hvd.global_process_set if hvd.size() == 2 else hvd.add_process_set([victim, other])
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.2), die).start()
    while both.included():
        hvd.allreduce(np.ones(300_000), name="pair", op=hvd.Adasum, process_set=both)
    hvd.join()


def die_while_sets_are_added_and_removed(victim, key):
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.2), die).start()
    while True:
        first = hvd.add_process_set([0])
        last = hvd.add_process_set([hvd.size() - 1])
        hvd.remove_process_set(first)
        hvd.remove_process_set(last)


def _gone(victim):
    try:
        hvd.allreduce(np.ones(1), name="probe")
    except hvd.HorovodInternalError:
        return True
    return False


def environment(key):
    """Variables without time limits, and with one or several connections between hosts."""
    return NO_LIMITS | {"HOROPLUG_NUM_STREAMS": str(random.Random(key).choice([1, 3]))}


PHASES = [
    die_idle,
    die_after_submitting,
    die_under_load,
    die_during_small_ones,
    die_while_plans_break,
    die_before_barrier,
    die_while_others_compute,
    die_before_joining,
    die_in_a_set,
    die_while_sets_are_added_and_removed,
]


@pytest.mark.parametrize("hosts", ["aa", "ab", "aaa", "aab", "abc"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.short("*-ab", failure=True)
def test_killed_rank_is_named_by_the_survivors(pool, phase, hosts):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=environment(key)) as job:
        internal(errors_of_survivors(job.outcomes(phase, victim, key), victim))
        # Later operations fail at once and name the same rank.
        survivors = type(job)([w for r, w in enumerate(job.workers) if r != victim])
        internal(survivors.outcomes(lambda: hvd.allreduce(np.ones(2))), f"rank {victim}")
        survivors.run(hvd.shutdown)


def die_while_joining(victim, key):
    """Die at a random moment of init or shutdown."""
    if hvd.rank() == victim:
        threading.Timer(random.Random(key).uniform(0.0, 0.1), die).start()
    while True:
        hvd.shutdown()
        hvd.init()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
@pytest.mark.parametrize("number", range(4))
def test_rank_killed_during_init_is_named(pool, hosts, number):
    key = seed()
    victim = random.Random(key).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=environment(key)) as job:
        errors_of_survivors(job.outcomes(die_while_joining, victim, key), victim)


def start_again_without_rank_0(victim):
    rank = hvd.rank()
    hvd.shutdown()
    if rank == victim:
        die()
    if rank:
        hvd.init()


def test_lost_rank_is_named_by_a_rank_that_waits_in_init_for_rank_0(pool):
    """Rank 0 would notice the loss in init, but it does not call init again."""
    with pool.ranks(3, env=NO_LIMITS) as job:
        first, waiting, victim = job.outcomes(start_again_without_rank_0, 2)
        assert not first.failed, first
        assert victim.died
        assert "HorovodInternalError" in waiting.bases, waiting
        assert "rank 2" in waiting.message, waiting


def die_before_init(victim):
    if int(os.environ["HOROVOD_RANK"]) == victim:
        die()
    hvd.init()


def test_rank_killed_before_init_is_named_after_the_start_timeout(pool):
    """A rank that never starts can only be noticed by the start timeout."""
    limit = round(scaled(2))  # in which the two other ranks connect
    env = NO_LIMITS | {"HOROVOD_START_TIMEOUT": str(limit)}
    with pool.ranks(3, env=env, init=False) as job:
        outcomes = job.outcomes(die_before_init, 1)
        for outcome in errors_of_survivors(outcomes, 1, kind="RendezvousError"):
            assert f"rank 1 did not connect within {limit} s" in outcome.message


def linger(victim, over):
    """Die, leaving a forked child that has copies of all descriptors."""
    if hvd.rank() == victim:
        fifo = os.open(over, os.O_RDONLY | os.O_NONBLOCK)
        child = os.fork()
        if child == 0:
            os.close(support.connection_to_tests)  # with which the tests detect the death
            select.select([fifo], [], [], 60)
            os._exit(0)
        die()
    hvd.allreduce(np.ones(10), name="waiting")


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_killed_rank_is_noticed_while_its_child_lives(pool, hosts, tmp_path):
    os.mkfifo(tmp_path / "over")
    over = os.open(tmp_path / "over", os.O_RDWR)
    try:
        with pool.ranks(len(hosts), hosts=hosts, env=environment(seed())) as job:
            internal(errors_of_survivors(job.outcomes(linger, 1, tmp_path / "over"), 1))
    finally:
        os.write(over, b"x")
        os.close(over)
