"""Programs with several threads: it is no deadlock while a thread may submit what other ranks wait for."""

import _thread
import contextlib
import itertools
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import horoplug as hvd
from horoplug.base.numbers import FREE_THREADED, LockedNumbers, consecutive
from tests.harness.busy_training import Load
from tests.harness.busy_training import run as run_busy_training
from tests.harness.checks.errors import internal
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

QUICK = {"HOROVOD_DEADLOCK_TIME_SECONDS": "0.4"}
LIMIT = 60.0  # seconds for another thread to do something


def reduce(name):
    return hvd.allreduce(np.ones(3), op=hvd.Sum, name=name)[0]


@contextlib.contextmanager
def sets_when_warned(event, text):
    """Set the event when this rank logs a warning that contains the text."""
    handler = logging.Handler()
    handler.emit = lambda record: event.set() if text in record.getMessage() else None
    logger = logging.getLogger("horoplug")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def opposite_orders(late_is_daemon, both_are_late):
    """The main threads wait for each other's late threads. That of rank 0 submits after the warning, and that of rank 1
    when its main thread continues. A daemon thread counts because it has submitted before."""
    is_first = hvd.rank() == 0
    now, later = ("x", "y") if is_first else ("y", "x")
    known, go = threading.Event(), threading.Event()
    results = []

    def late():
        if late_is_daemon:
            reduce("before")
        known.set()
        assert go.wait(LIMIT)
        results.append(reduce(later))

    thread = None
    if is_first or both_are_late:
        thread = threading.Thread(target=late, daemon=late_is_daemon)
        thread.start()
        assert known.wait(LIMIT)
    elif late_is_daemon:
        reduce("before")
    with sets_when_warned(go, "possible deadlock") if is_first else contextlib.nullcontext():
        results.append(reduce(now))
    go.set()
    if thread is None:
        results.append(reduce(later))
    else:
        thread.join(LIMIT)
    return results


@pytest.mark.parametrize("both_are_late", [False, True], ids=["one rank", "both ranks"])
@pytest.mark.parametrize("late_is_daemon", [False, True], ids=["has not submitted", "daemon"])
def test_late_thread_is_not_a_deadlock(pool, late_is_daemon, both_are_late):
    with pool.ranks(2, env=QUICK) as job:
        assert job.run(opposite_orders, late_is_daemon, both_are_late) == [[2, 2], [2, 2]]


@pytest.mark.parametrize("hosts", ["aa", "aab", "abab"])
def test_busy_ranks_are_no_failure(pool, hosts):
    """tests/soak/busy_training.py does the same for a minute."""
    env = QUICK | {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
    load = Load(seconds=2, checkpoint=1.2, evaluation=0.3)
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        for result in job.run(run_busy_training, load, seed()):
            assert result.evaluations or result.steps
            errors = [text for text in result.log if "deadlock" in text]
            assert all("possible deadlock" in text for text in errors), errors


def deadlock_beside_libraries():
    """Daemon threads that have not submitted, threads of pools and threads that have ended do not submit any more."""
    submitted, end = threading.Event(), threading.Event()

    def submit_for_another_thread():
        reduce("gradient")
        submitted.set()
        end.wait(LIMIT)

    threading.Thread(target=end.wait, args=(LIMIT,), daemon=True).start()
    _thread.start_new_thread(submit_for_another_thread, ())
    assert submitted.wait(LIMIT)
    ended = threading.Thread(target=reduce, args=("ended",))
    ended.start()
    ended.join(LIMIT)
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        try:
            reduce("here" if hvd.rank() == 0 else "there")
        finally:
            end.set()


@pytest.mark.skipif(
    FREE_THREADED, reason="CPython does not let one thread see what another one waits for"
)
def test_other_threads_do_not_hide_a_deadlock(pool):
    with pool.ranks(2, env=QUICK) as job:
        internal(job.outcomes(deadlock_beside_libraries), "deadlock: ", "here", "there")
        assert job.run(reduce, "after") == [2, 2]


def operations_of_many_threads(threads, rounds, given_seed):
    """Each thread calls operations of all kinds. Some of the asynchronous ones are waited for by another thread.
    Returns what was wrong."""
    rank, size = hvd.rank(), hvd.size()
    start = threading.Barrier(threads)
    wrong = []
    passed_on = [[] for _ in range(threads)]

    def check(what, got, wanted):
        if not np.array_equal(got, wanted):
            wrong.append((what, got, wanted))

    def loop(me):
        choices = random.Random(given_seed + me)  # the same on all ranks
        start.wait(LIMIT)
        for i in range(rounds):
            name = f"{me}.{i}"
            value = np.full(choices.choice([1, 3, 1000, 40_000]), float(rank + me), np.float32)
            total = np.full_like(value, sum(range(size)) + me * size)
            kind = choices.randrange(6)
            if kind == 0:
                check(name, hvd.allreduce(value, op=hvd.Sum, name=name), total)
            elif kind == 1:
                parts = [np.full(min(r + 1, len(value)), float(r + me)) for r in range(size)]
                check(name, hvd.allgather(value[: rank + 1], name=name), np.concatenate(parts))
            elif kind == 2:
                handle = hvd.allreduce_async(value, op=hvd.Sum, name=name)
                while not hvd.poll(handle):
                    pass
                check(name, hvd.synchronize(handle), total)
            elif kind == 3:
                handles = hvd.grouped_allreduce_async([value, value], op=hvd.Sum, name=name)
                for result in hvd.synchronize(handles):
                    check(name, result, total)
            elif kind == 4:
                root = choices.randrange(size)
                check(name, hvd.broadcast(value, root, name=name), np.full_like(value, root + me))
            else:
                handle = hvd.allreduce_async(value, op=hvd.Sum, name=name)
                passed_on[(me + 1) % threads].append((name, handle, total))
            while passed_on[me]:
                other, handle, wanted = passed_on[me].pop(0)
                check(other, hvd.synchronize(handle), wanted)

    def run(me):
        try:
            loop(me)
        except BaseException as error:
            wrong.append((me, repr(error)))
            raise

    running = [threading.Thread(target=run, args=(me,)) for me in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(LIMIT)
    for left in passed_on:
        for name, handle, wanted in left:
            check(name, hvd.synchronize(handle), wanted)
    return wrong


@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_many_threads_of_a_rank_call_operations(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as job:
        wrong = job.run(operations_of_many_threads, 6, 60, seed())
        assert wrong == [[]] * len(hosts)


def test_numbers_are_given_once():
    """As context's handles are without a global interpreter lock."""
    numbers, taken = LockedNumbers(), [[] for _ in range(4)]
    start = threading.Barrier(len(taken))

    def take(own):
        start.wait(LIMIT)
        for _ in range(2000):
            own.append(next(numbers))
            batch = consecutive(numbers, 3)
            assert batch == list(range(batch[0], batch[0] + 3))
            own += batch

    threads = [threading.Thread(target=take, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(itertools.chain(*taken)) == list(range(1, 4 * 2000 * 4 + 1))
