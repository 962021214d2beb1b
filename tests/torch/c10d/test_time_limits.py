"""The time limit of a group holds on every path: for planned and negotiated operations, blocking and asynchronous ones,
and for futures."""

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.harness.process_groups import begin, new_file
from tests.harness.support import process_state, until

pytest_plugins = ["tests.harness.jobs"]

LIMIT = 4.0
GENEROUS = 20.0
"""Less than the 30 seconds that a transfer without progress has by default."""


def planned(group):
    for _ in range(20):
        dist.all_reduce(torch.ones(1 << 16), group=group)


def nothing(_):
    pass


def wait_for(seconds):
    return lambda g: dist.all_reduce(torch.ones(1 << 16), group=g, async_op=True).wait(
        timedelta(seconds=seconds)
    )


class Case(NamedTuple):
    """A wait of one rank while the other one is stopped. Each has a group of its own."""

    run: Callable[[Any], Any]
    prepare: Callable[[Any], Any] = nothing
    """What all ranks do before."""
    limit: float = LIMIT
    """After how many seconds it has to fail."""
    of_group: float = LIMIT
    """The limit with which the group is made."""
    text: str = "the argument timeout of init_process_group or new_group sets the limit"


LATE_WAIT = "wait() timed out"
LATE_CALL = "the argument timeout of its call sets this limit"


def set_timeout(seconds):
    return lambda g: g.set_timeout(timedelta(seconds=seconds))


def limited(options, seconds):
    options.timeout = timedelta(seconds=seconds)
    return options


def allreduce_within(seconds, group, tensor=None):
    tensor = torch.ones(7) if tensor is None else tensor
    return group.allreduce([tensor], limited(dist.AllreduceOptions(), seconds))


def blocking_allreduce_within(seconds, group):
    options = limited(dist.AllreduceOptions(), seconds)
    options.asyncOp = False
    work = group.allreduce([torch.ones(7)], options)
    if work is not None:  # as in dist.all_reduce
        work.wait()


CASES = {
    "planned": Case(lambda g: dist.all_reduce(torch.ones(1 << 16), group=g), planned),
    "negotiated": Case(lambda g: dist.all_reduce(torch.ones(7), group=g)),
    "barrier": Case(lambda g: dist.barrier(g)),
    "recv": Case(lambda g: dist.recv(torch.ones(3), 1, group=g)),
    "wait() of a planned operation": Case(
        lambda g: dist.all_reduce(torch.ones(1 << 16), group=g, async_op=True).wait(), planned
    ),
    "future of a planned operation": Case(
        lambda g: dist.all_reduce(torch.ones(1 << 16), group=g, async_op=True).get_future().wait(),
        planned,
    ),
    "future of a negotiated operation": Case(
        lambda g: dist.broadcast(torch.ones(5), 1, group=g, async_op=True).get_future().wait(),
    ),
    "wait(timeout) of a planned operation": Case(wait_for(1), planned, 1, text=LATE_WAIT),
    "wait(timeout) of a negotiated operation": Case(wait_for(1.5), limit=1.5, text=LATE_WAIT),
    "wait(timeout) longer than the limit of the group": Case(wait_for(3600), planned),
    "longer limit that is set later": Case(
        lambda g: dist.all_reduce(torch.ones(7), group=g), set_timeout(2 * LIMIT), limit=2 * LIMIT
    ),
    "shorter limit that is set later": Case(
        lambda g: dist.all_reduce(torch.ones(7), group=g), set_timeout(LIMIT), of_group=600
    ),
    "wait() of a call with a limit": Case(
        lambda g: allreduce_within(1, g).wait(), limit=1, of_group=600, text=LATE_CALL
    ),
    "wait(timeout) of a call with a shorter limit": Case(
        lambda g: allreduce_within(1, g).wait(timedelta(seconds=600)),
        limit=1,
        of_group=600,
        text=LATE_CALL,
    ),
    "wait(timeout) of a call with a longer limit": Case(
        lambda g: allreduce_within(600, g).wait(timedelta(seconds=1)),
        limit=1,
        of_group=600,
        text=LATE_WAIT,
    ),
    "wait() of a sparse tensor and a call with a limit": Case(
        lambda g: allreduce_within(1, g, torch.ones(3).to_sparse()).wait(),
        limit=1,
        of_group=600,
        text=LATE_CALL,
    ),
    "future of a call with a limit": Case(
        lambda g: allreduce_within(1, g).get_future().wait(), limit=1, of_group=600, text=LATE_CALL
    ),
    "blocking call with a limit": Case(
        lambda g: blocking_allreduce_within(1, g), limit=1, of_group=600, text=LATE_CALL
    ),
}
if "timeout" in inspect.signature(dist.barrier).parameters:  # PyTorch 2.13
    CASES["barrier with a limit"] = Case(
        lambda g: dist.barrier(g, timeout=timedelta(seconds=1)),
        limit=1,
        of_group=600,
        text=LATE_CALL,
    )


def seconds_until_errors(file):
    """By case: after how many seconds the error came, and its text."""
    begin(file, seconds=60)
    groups = {
        name: dist.new_group(timeout=timedelta(seconds=case.of_group))
        for name, case in CASES.items()
    }
    for name, case in CASES.items():
        case.prepare(groups[name])
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: process_state(pids[1]) == "T", 60)
    results = {}

    def run(name):
        start = time.monotonic()
        try:
            CASES[name].run(groups[name])
        except Exception as error:
            results[name] = time.monotonic() - start, type(error).__name__, str(error)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in CASES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GENEROUS)
    return results


def test_limit_of_the_group_holds_on_every_path(pool, tmp_path):
    with pool.ranks(2, init=False) as ranks:
        waiting, stopped = ranks.workers
        ranks.start(seconds_until_errors, new_file(tmp_path))
        try:
            outcome = waiting.receive()
        finally:
            stopped.kill()
            waiting.kill()  # its groups cannot be left in good order
    assert not outcome.failed, outcome
    for name, case in CASES.items():
        assert name in outcome.value, f"{name} waits on"
        seconds, kind, text = outcome.value[name]
        assert case.limit <= seconds < GENEROUS, f"{name}: {seconds:.1f} s: {text}"
        assert kind in ("DistBackendError", "RuntimeError"), f"{name}: {kind}"  # of C++ futures
        assert "\n" not in text or "future" in name
        assert case.text in text, name


def stop_in_the_default_group(file):
    begin(file, seconds=LIMIT)
    planned(None)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: process_state(pids[1]) == "T", 60)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="init_process_group"):
        dist.all_reduce(torch.ones(1 << 16))
    seconds = time.monotonic() - start
    dist.destroy_process_group()
    return seconds


def test_limit_of_the_default_group_holds_for_a_planned_operation(pool, tmp_path):
    with pool.ranks(2, init=False) as ranks:
        waiting, stopped = ranks.workers
        ranks.start(stop_in_the_default_group, new_file(tmp_path))
        try:
            outcome = waiting.receive()
        finally:
            stopped.kill()
    assert not outcome.failed, outcome
    assert LIMIT <= outcome.value < GENEROUS
