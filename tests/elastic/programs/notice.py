import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import broadcast_object
from tests.harness.elastic_process import ME, say

FILE = Path(os.environ["CHECKPOINT"])
WAITS = sys.argv[1] == "waits" and not FILE.exists()
FAIL = tuple(map(int, sys.argv[2].split(","))) if len(sys.argv) > 2 else None

hvd.init()
begin = json.loads(FILE.read_text()) if FILE.exists() else 0
state = ObjectState(broadcast_object, hvd.rank, step=begin)


def write_checkpoint():
    # Callbacks may communicate.
    steps = hvd.allgather(np.array([state.step]), name="steps")
    assert (steps == state.step).all()
    say("notice", ME, "rank", hvd.rank(), "of", hvd.size(), "step", state.step)
    if hvd.rank() == 0:
        FILE.write_text(json.dumps(state.step))


state.register_notice_callbacks([write_checkpoint])


def train(state):
    while state.step < begin + 20 or WAITS:
        if (ME, state.step) == FAIL:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(10), name="gradient")
        state.step += 1
        state.commit()
        if state.step == 5:
            say("step 5 of", ME)
    return state.step


steps = run_fn(train, initialize_again)(state)
say("done", ME, "from", begin, "to", steps)
