"""The processors of an engine's threads: those of the host's ranks together, where each rank is bound to one."""

import json
import os
import subprocess
import sys

import pytest

from horoplug.base.processors import engine_processors, own_processors, starting_threads_on
from tests.harness.support import environment

# As mpirun --bind-to core does: each process starts on the processor that it is bound to.
BOUND = """
import json, os, sys
rank, count = int(os.environ["HOROVOD_RANK"]), int(sys.argv[1])
own = {sorted(os.sched_getaffinity(0))[rank % count]}
os.sched_setaffinity(0, own)
import numpy as np
import horoplug as hvd
hvd.init()
hvd.allreduce(np.ones(10))
masks = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
hvd.barrier()
sys.stdout.write(json.dumps([os.sched_getaffinity(0) == own, max(masks, key=len)]) + "\\n")
"""


@pytest.mark.parametrize("count", [1, 2])
def test_progress_thread_of_a_bound_rank(count):
    """It may use the processors of all ranks of the host; the main thread keeps the one that it is bound to."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < count:
        pytest.skip("needs two processors")
    command = [sys.executable, "-m", "horoplug.runner", "-np", "2", sys.executable, "-c", BOUND]
    done = subprocess.run(
        [*command, str(count)], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [json.loads(line.partition(":")[2]) for line in done.stdout.splitlines()]
    assert rows == [[True, available[:count]]] * 2


def test_binding_that_leaves_enough_processors_is_kept():
    own = own_processors()
    assert own >= os.sched_getaffinity(0)
    more = own | {1000}
    assert engine_processors(more, 1) == (own if len(own) > 1 else more)
    assert engine_processors(more, len(own) + 1) == more
    before = os.sched_getaffinity(0)
    with starting_threads_on({100_000}):  # does not exist
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
