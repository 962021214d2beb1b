"""Mismatches, deadlocks, stopped ranks and shutdown: every rank gets an error in time that names tensor and ranks."""

import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest

import horoplug as hvd
from horoplug.rendezvous.connections.host_hub import HubLoop
from tests.harness.checks.errors import internal
from tests.harness.limits import scaled
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

QUICK = {"HOROVOD_DEADLOCK_TIME_SECONDS": "1"}
# With default settings, all ranks of a deadlock get an error within this many seconds.
DEADLOCK_PROMISE = 10.0
ranks = ranks_fixture("aa", "ab", "aab", "abcd", env=QUICK)


def healthy():
    """Check that every operation still works, with a name and without."""
    size, rank = hvd.size(), hvd.rank()
    for name in (None, "after"):
        assert hvd.allreduce(np.array([rank]), op=hvd.Sum, name=name) == size * (size - 1) // 2
        assert hvd.allgather(np.array([rank]), name=name).tolist() == list(range(size))
        assert hvd.broadcast(np.array([rank]), size - 1, name=name) == size - 1
        assert hvd.alltoall(np.full(size, rank), name=name).tolist() == list(range(size))
        assert hvd.reducescatter(np.ones(size), name=name) == 1
    hvd.barrier()


def until_the_last_error(outcomes):
    """Seconds from the start of the last rank's call until the last rank had its error."""
    return max(o.ended for o in outcomes) - max(o.began for o in outcomes)


def both(first, others):
    """A call that is ``first`` on rank 0 and ``others`` on the other ranks."""
    return lambda name: first(name) if hvd.rank() == 0 else others(name)


ONES = np.ones((4, 3), np.float32)
# What differs: (word in the message, calls)
MISMATCHES = {
    "reduction": both(
        lambda n: hvd.allreduce(ONES, op=hvd.Sum, name=n),
        lambda n: hvd.allreduce(ONES, op=hvd.Max, name=n),
    ),
    "dtype": both(
        lambda n: hvd.allreduce(ONES, name=n), lambda n: hvd.allreduce(ONES.astype("f8"), name=n)
    ),
    "shape": both(lambda n: hvd.allreduce(ONES, name=n), lambda n: hvd.allreduce(ONES[:2], name=n)),
    "dimensions": both(
        lambda n: hvd.allreduce(ONES, name=n), lambda n: hvd.allreduce(ONES.ravel(), name=n)
    ),
    "prescale": both(
        lambda n: hvd.allreduce(ONES, name=n, prescale_factor=2.0),
        lambda n: hvd.allreduce(ONES, name=n),
    ),
    "group": both(
        lambda n: hvd.grouped_allreduce([ONES, ONES], name=n),
        lambda n: hvd.grouped_allreduce([ONES], name=n),
    ),
    "shape in group": both(
        lambda n: hvd.grouped_allreduce([ONES, ONES], name=n),
        lambda n: hvd.grouped_allreduce([ONES, ONES[1:]], name=n),
    ),
    "root": both(
        lambda n: hvd.broadcast(ONES, 0, name=n), lambda n: hvd.broadcast(ONES, 1, name=n)
    ),
    "shape of broadcast": both(
        lambda n: hvd.broadcast(ONES, 0, name=n), lambda n: hvd.broadcast(ONES[1:], 0, name=n)
    ),
    "row of allgather": both(
        lambda n: hvd.allgather(ONES, name=n), lambda n: hvd.allgather(ONES[:, 1:], name=n)
    ),
    "dtype of allgather": both(
        lambda n: hvd.allgather(ONES, name=n), lambda n: hvd.allgather(ONES.astype("i4"), name=n)
    ),
    "row of alltoall": both(
        lambda n: hvd.alltoall(np.ones((8, 3)), [1] * hvd.size(), name=n),
        lambda n: hvd.alltoall(np.ones((8, 2)), [1] * hvd.size(), name=n),
    ),
    "shape of reducescatter": both(
        lambda n: hvd.reducescatter(ONES, name=n), lambda n: hvd.reducescatter(ONES[1:], name=n)
    ),
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.short("aa-*-named", failure=True)
def test_mismatch_names_operation_and_ranks(ranks, what, named):
    name = f"x {what}" if named else None
    outcomes = ranks.outcomes(lambda: MISMATCHES[what](name))
    internal(outcomes, f".{name}" if named else ".noname.", "rank")
    ranks.run(healthy)


def check_mismatch_among_good(key):
    """Of several operations in flight, only the mismatched one fails."""
    draw = random.Random(key)
    bad = draw.randrange(20)
    for _ in range(3):
        handles = []
        for n in range(20):
            x = np.full(n + 1 + (n == bad and hvd.rank() == 0), 1.0)
            handles.append(hvd.allreduce_async(x, op=hvd.Sum, name=f"n{n}"))
        for n, handle in enumerate(handles):
            if n == bad:
                with pytest.raises(hvd.HorovodInternalError, match=f"n{bad}"):
                    hvd.synchronize(handle)
            else:
                assert (hvd.synchronize(handle) == hvd.size()).all()


def test_mismatch_leaves_other_operations_intact(ranks):
    ranks.run(check_mismatch_among_good, seed())
    ranks.run(healthy)


DEADLOCKS = {
    "different operations": both(lambda n: hvd.allreduce(ONES), lambda n: hvd.allgather(ONES)),
    "different names": both(
        lambda n: hvd.allreduce(ONES, name="here"), lambda n: hvd.allreduce(ONES, name="there")
    ),
    "barrier": both(lambda n: hvd.barrier(), lambda n: hvd.allreduce(ONES, name="there")),
}


@pytest.mark.parametrize("what", DEADLOCKS)
@pytest.mark.short("aa-*", failure=True)
def test_deadlock_names_what_each_rank_waits_for(ranks, what):
    for _ in range(2):
        outcomes = ranks.outcomes(lambda: DEADLOCKS[what](None))
        internal(outcomes, "rank")
        if what == "different names":
            internal(outcomes, "here", "there")
        assert until_the_last_error(outcomes) < DEADLOCK_PROMISE
        ranks.run(healthy)


def test_deadlock_is_noticed_with_default_settings(pool):
    with pool.ranks(2) as job:
        outcomes = job.outcomes(lambda: DEADLOCKS["different operations"](None))
        internal(outcomes, "allreduce", "allgather")
        assert until_the_last_error(outcomes) < DEADLOCK_PROMISE
        job.run(healthy)


def check_slow_is_no_deadlock():
    """One rank computes for longer than the deadlock time while the others wait."""
    if hvd.rank() == 0:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
    return hvd.allreduce(np.ones(3), op=hvd.Sum, name="slow")[0]


def test_slow_rank_is_not_a_deadlock(ranks):
    assert ranks.run(check_slow_is_no_deadlock) == [ranks.size] * ranks.size


def test_stopped_rank_is_waited_for(pool):
    """A rank stopped by SIGSTOP is neither dead nor in a deadlock: the others wait until it continues."""
    with pool.ranks(2, env=QUICK) as job:
        job.workers[1].process.send_signal(signal.SIGSTOP)
        job.start(lambda: hvd.allreduce(np.ones(2), op=hvd.Sum, name="stopped")[0])
        # The rank is stopped for longer than the deadlock time.
        threading.Timer(2.5, os.kill, (job.workers[1].process.pid, signal.SIGCONT)).start()
        assert [o.value for o in job.collect()] == [2, 2]


def leave_early():
    if hvd.rank() == 0:
        hvd.shutdown()
        return
    hvd.allreduce(np.ones(3), name="waiting")


def test_rank_that_shuts_down_is_named(ranks):
    """shutdown() on one rank fails the operations that the others wait for, with an error that says so."""
    outcomes = ranks.outcomes(leave_early)
    assert not outcomes[0].failed
    internal(outcomes[1:], "rank 0")
    ranks.run(hvd.shutdown)
    ranks.run(hvd.init)
    ranks.run(healthy)


def go_round(path):
    """Run allreduces until one fails. Creates the file at the path once some have completed."""
    for step in range(1_000_000):
        hvd.allreduce(np.ones(200_000, np.float32), op=hvd.Sum, name="round")
        if step == 10 and hvd.rank() == 0:
            path.touch()


@pytest.mark.short(failure=True)
def test_rank_stopped_during_a_transfer_is_named(pool, tmp_path):
    """All ranks name it, although most of them wait for a rank that is itself waiting."""
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": f"{scaled(2):.1f}", "HOROPLUG_ALGORITHM": "ring"}
    with pool.ranks(4, hosts="abcd", env=env) as job:
        *others, stopped = job.workers
        started = tmp_path / "started"
        job.start(go_round, started)
        job.until(started.exists)
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            outcomes = [worker.receive() for worker in others]
        finally:
            stopped.process.send_signal(signal.SIGCONT)
            stopped.receive()
        internal(outcomes, "rank 3")
        first = next(o.message for o in outcomes if "no progress" in o.message)
        assert "waiting for rank 3, which does not answer" in first


def test_rank_stopped_before_an_operation_is_named(pool):
    """The errors do not name ranks whose messages the stopped rank would have forwarded."""
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
    with pool.ranks(4, hosts="aabb", env=env) as job:
        stopped = job.workers[2]
        others = [worker for worker in job.workers if worker is not stopped]
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            job.start(lambda: hvd.allreduce(np.ones(2), op=hvd.Sum, name="waiting"))
            outcomes = [worker.receive() for worker in others]
        finally:
            stopped.process.send_signal(signal.SIGCONT)
            stopped.receive()
        internal(outcomes, "waiting")
        for outcome in outcomes:  # rank 3, which asks rank 2, may be as quick as rank 0
            assert re.search("rank 2(, which does not| did not) answer", outcome.message), outcome
            assert not re.search("rank(s 2,)? 3", outcome.message), outcome


def stop_while_the_host_connects(victim):
    if int(os.environ["HOROVOD_RANK"]) == victim:
        HubLoop.run_once = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    hvd.init()


@pytest.mark.parametrize("victim", [3, 4], ids=["hub", "member"])
def test_rank_stopped_while_its_host_connects_is_named(pool, victim):
    limit = round(scaled(3))  # in which all other ranks connect
    env = {"HOROVOD_START_TIMEOUT": str(limit)}
    with pool.ranks(6, hosts="aaabbb", env=env, init=False) as job:
        job.start(stop_while_the_host_connects, victim)
        outcomes, _ = job.collect_beside_stopped(victim)
        for outcome in outcomes:
            assert outcome.kind in ("MissingRanksError", "PeerLostError"), outcome
            (ranks,) = re.findall(
                rf"ranks? (\S+|\[[\d, ]+\]) did not connect within {limit} s", outcome.message
            )
            named = {int(rank) for rank in re.findall(r"\d+", ranks)}
            assert victim in named, outcome
            assert named <= {3, 4, 5}, "the ranks of the other host have connected"
