"""A rank that cannot continue does not let its peers fill its memory with data that it has not asked for."""

import os
import signal
import time
from pathlib import Path

import numpy as np

import horoplug as hvd
from tests.harness.support import NO_LIMITS, process_memory, wait_until_stopped

pytest_plugins = ["tests.harness.jobs"]

# A rank forwards each broadcast to the next one; the root needs nobody's answer.
CHAIN = {"HOROPLUG_ALGORITHM": "chain", "HOROVOD_FUSION_THRESHOLD": "0"}
COUNT = 16
ELEMENTS = 4 << 20
SENT = COUNT * ELEMENTS * 4


def broadcasts(stops):
    """Broadcast many tensors at once; after the first one, the last rank may stop. Return the growth of the memory."""
    data = [np.full(ELEMENTS, i if hvd.rank() == 0 else -1, np.float32) for i in range(COUNT)]
    Path("/proc/self/clear_refs").write_text("5")
    before = process_memory("self")
    handles = [hvd.broadcast_async_(d, 0, name=f"large {i}") for i, d in enumerate(data)]
    hvd.synchronize(handles[0])
    if stops and hvd.rank() == hvd.size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    for handle in handles[1:]:
        hvd.synchronize(handle)
    assert all((d == i).all() for i, d in enumerate(data))
    return process_memory("self", "VmHWM") - before


def wait_until_constant(pid):
    """Wait until the memory of a process has not grown for half a second. On a slow machine that may be too early:
    then less has arrived than could have, and the test still passes."""
    most, since = 0, time.monotonic()
    until = since + 60
    while time.monotonic() < min(since + 0.5, until):
        if (now := process_memory(pid)) > most:
            most, since = now, time.monotonic()
        time.sleep(0.01)


def test_memory_of_the_neighbour_of_a_stopped_rank_is_bounded(pool):
    with pool.ranks(3, hosts="abc", env=NO_LIMITS | CHAIN) as job:
        job.start(broadcasts, True)
        neighbour, stopped = (worker.process.pid for worker in job.workers[1:])
        try:
            wait_until_stopped(stopped)
            wait_until_constant(neighbour)
        finally:
            os.kill(stopped, signal.SIGCONT)
        outcomes = job.collect()
        assert not any(outcome.failed for outcome in outcomes), outcomes
        assert max(outcome.value for outcome in outcomes) < SENT / 3
        job.run(broadcasts, False)
