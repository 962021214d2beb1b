"""The time limit of a group holds on every path: for planned and negotiated operations, blocking and asynchronous ones,
and for futures."""

import os
import signal
import threading
import time
from datetime import timedelta

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


# What all ranks do before, what one does when the other one is stopped, and after how many seconds it has to fail. Each
# has a group of its own.
CASES = {
    "planned": (planned, lambda g: dist.all_reduce(torch.ones(1 << 16), group=g), LIMIT),
    "negotiated": (nothing, lambda g: dist.all_reduce(torch.ones(7), group=g), LIMIT),
    "barrier": (nothing, lambda g: dist.barrier(g), LIMIT),
    "recv": (nothing, lambda g: dist.recv(torch.ones(3), 1, group=g), LIMIT),
    "wait() of a planned operation": (
        planned,
        lambda g: dist.all_reduce(torch.ones(1 << 16), group=g, async_op=True).wait(),
        LIMIT,
    ),
    "future of a planned operation": (
        planned,
        lambda g: dist.all_reduce(torch.ones(1 << 16), group=g, async_op=True).get_future().wait(),
        LIMIT,
    ),
    "future of a negotiated operation": (
        nothing,
        lambda g: dist.broadcast(torch.ones(5), 1, group=g, async_op=True).get_future().wait(),
        LIMIT,
    ),
    "wait(timeout) of a planned operation": (planned, wait_for(1), 1),
    "wait(timeout) of a negotiated operation": (nothing, wait_for(1.5), 1.5),
    "wait(timeout) longer than the limit of the group": (planned, wait_for(3600), LIMIT),
}


def seconds_until_errors(file):
    """By case: after how many seconds the error came, and its text."""
    begin(file, seconds=60)
    limit = timedelta(seconds=LIMIT)
    groups = {name: dist.new_group(timeout=limit) for name in CASES}
    for name, (prepare, _, _) in CASES.items():
        prepare(groups[name])
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: process_state(pids[1]) == "T", 60)
    results = {}

    def run(name):
        start = time.monotonic()
        try:
            CASES[name][1](groups[name])
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
    for name, (_, _, limit) in CASES.items():
        assert name in outcome.value, f"{name} waits on"
        seconds, kind, text = outcome.value[name]
        assert limit <= seconds < GENEROUS, f"{name}: {seconds:.1f} s: {text}"
        assert kind in ("DistBackendError", "RuntimeError"), f"{name}: {kind}"  # of C++ futures
        assert "\n" not in text or "future" in name
        if "wait(timeout) of" in name:
            assert "wait() timed out" in text
        else:
            assert "the argument timeout of init_process_group or new_group sets the limit" in text


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
