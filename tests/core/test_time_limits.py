"""Time limits of waits for a rank that is stopped: each begins with its wait, whatever the ranks have done before.

All kinds of waits run at the same time, each in a job of its own, so that they are idle together."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import internal
from tests.harness.limits import scaled
from tests.harness.on_demand import ON_DEMAND, strangers
from tests.harness.support import process_state, seed, until, wait_until_stopped

pytest_plugins = ["tests.harness.jobs"]

LIMIT = 1.5
IDLE = 6.0
"""Seconds without operations. A limit that counted them would be reached only after IDLE + LIMIT."""


def x(size=1000):
    return np.ones(size, np.float32)


def repeat_until_planned():
    for _ in range(12):
        hvd.allreduce(x(), name="planned")


def submit_on_one_rank(rank):
    if hvd.rank() == rank:
        hvd.allreduce_async(x(), name="submitted")


def offer(rank):
    if hvd.rank() == rank:
        hvd.send_async(x(1 << 20), 1 - rank)


def poll(handle):
    """Never block."""
    while not hvd.poll(handle):
        time.sleep(0.001)
    hvd.synchronize(handle)


def nothing(_):
    pass


# By kind of wait: what all ranks do before, given the rank that stops later, and what the other one does then, given
# the same.
WAITS = {
    "negotiation": (nothing, lambda _: hvd.allreduce(x(), name="new")),
    "polled negotiation": (nothing, lambda _: poll(hvd.allreduce_async(x(), name="new"))),
    "negotiated transfer": (submit_on_one_rank, lambda _: hvd.allreduce(x(), name="submitted")),
    "planned transfer": (
        lambda _: repeat_until_planned(),
        lambda _: hvd.allreduce(x(), name="planned"),
    ),
    "asynchronous planned transfer": (
        lambda _: repeat_until_planned(),
        lambda _: poll(hvd.allreduce_async(x(), name="planned")),
    ),
    "barrier": (nothing, lambda _: hvd.barrier()),
    "join": (nothing, lambda _: hvd.join()),
    "send": (nothing, lambda stopped: hvd.send(x(1 << 20), stopped)),
    "recv": (nothing, lambda stopped: hvd.recv(x(), stopped)),
    "recv of an offer": (offer, lambda stopped: hvd.recv(x(1 << 20), stopped)),
}


def seconds_until_the_error(kind, stopped, waiting, before):
    """Seconds, and the error of the rank ``waiting``. ``before``: what happens between the preparation and the wait."""
    prepare, wait = WAITS[kind]
    pids = hvd.allgather_object(os.getpid())
    prepare(stopped)
    if before == "busy":
        for _ in range(30):
            hvd.allreduce(x(), name="busy")
    if hvd.rank() == stopped:
        if before == "idle":
            time.sleep(IDLE)
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: process_state(pids[stopped]) == "T", 60)
    if hvd.rank() != waiting:
        return None
    begin = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        wait(stopped)
    return time.monotonic() - begin, str(caught.value)


@contextlib.contextmanager
def jobs_at_once(pool, descriptions, env):
    """A job for each description, which is a string of hosts. No process belongs to two of them."""
    used = []
    with contextlib.ExitStack() as stack:
        jobs = []
        for hosts in descriptions:
            pool.workers = [worker for worker in pool.workers if worker not in used]
            jobs.append(stack.enter_context(pool.ranks(len(hosts), hosts=hosts, env=env)))
            used += jobs[-1].workers
        pool.workers = [*used, *(worker for worker in pool.workers if worker not in used)]
        yield jobs


def check_limits(pool, kinds, before):
    key = seed()
    choose = random.Random(key)
    kinds = [(kind, choose.choice(["aa", "ab"]), choose.randrange(2)) for kind in kinds]
    # A transfer that waits for the stopped rank has begun only if that rank has submitted its part to the root, rank 0.
    kinds = [(kind, hosts, 1 if "negotiated" in kind else rank) for kind, hosts, rank in kinds]
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
    with jobs_at_once(pool, [hosts for _, hosts, _ in kinds], env) as jobs:
        for job, (kind, _, stopped) in zip(jobs, kinds, strict=True):
            job.start(seconds_until_the_error, kind, stopped, 1 - stopped, before)
        results = {}
        try:
            for job, (kind, hosts, stopped) in zip(jobs, kinds, strict=True):
                results[f"{kind}, hosts {hosts}"] = stopped, job.workers[1 - stopped].receive()
        finally:
            for job, (_, _, stopped) in zip(jobs, kinds, strict=True):
                job.workers[stopped].kill()
    for kind, (stopped, outcome) in results.items():
        assert not outcome.failed, f"{kind}: {outcome}"
        seconds, text = outcome.value
        assert f"waiting for rank {stopped}, which does not answer" in text, kind
        assert LIMIT <= seconds < IDLE, f"{kind}: {seconds:.1f} s"


@pytest.mark.parametrize("before", ["idle", "busy"])
def test_limit_of_every_wait_begins_with_the_wait(pool, before):
    check_limits(pool, WAITS, before)


def test_limits_hold_while_other_programs_take_the_processors(pool):
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(len(os.sched_getaffinity(0)))
    ]
    try:
        check_limits(pool, ["negotiation", "planned transfer", "recv of an offer"], "nothing")
    finally:
        for process in busy:
            process.kill()
            process.wait(scaled(10))


def message_to_a_stranger(pair):
    """The first rank of the pair has no connection to the second one, which is stopped after an idle time."""
    pids = hvd.allgather_object(os.getpid())
    if hvd.rank() == pair[1]:
        time.sleep(IDLE)
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: process_state(pids[pair[1]]) == "T", 60)
    wait = hvd.barrier if hvd.rank() != pair[0] else lambda: hvd.send(x(3), pair[1])
    begin = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError, match=f"rank {pair[1]}"):
        wait()
    return time.monotonic() - begin


def test_limit_of_a_connection_on_demand_begins_with_its_request(pool):
    hosts = "aabbccd"
    pair = random.Random(seed()).choice(strangers(hosts))
    env = ON_DEMAND | {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
    with pool.ranks(len(hosts), hosts=hosts, env=env) as job:
        job.start(message_to_a_stranger, pair)
        stopped = job.workers[pair[1]]
        try:
            wait_until_stopped(stopped.process.pid)
            waiting = job.workers[pair[0]].receive()
        finally:
            stopped.kill()
        for worker in job.workers:
            if worker not in (stopped, job.workers[pair[0]]):
                worker.receive()
    assert not waiting.failed, waiting
    assert waiting.value < IDLE


def stop_in_a_plan():
    """A planned operation ends at the limit of an operation if that is the shortest one."""
    pids = hvd.allgather_object(os.getpid())
    repeat_until_planned()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: process_state(pids[1]) == "T", 60)
    hvd.allreduce(x(), name="planned")


@pytest.mark.parametrize("name", ["HOROPLUG_OPERATION_TIMEOUT_SECONDS"])
def test_limit_of_an_operation_holds_in_a_plan(pool, name):
    with pool.ranks(2, env={name: "1"}) as job:
        waiting, stopped = job.workers
        job.start(stop_in_a_plan)
        try:
            outcome = waiting.receive()
        finally:
            stopped.kill()
    internal([outcome], "'allreduce.planned' has made no progress for 1 s", name)
