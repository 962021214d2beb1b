import time

import numpy as np

import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import broadcast_object
from tests.harness.elastic_process import ME, say


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


hvd.init()
state = ObjectState(broadcast_object, hvd.rank, step=0)


def train(state):
    while state.step < 80:
        compute(0.06 if ME == 1 else 0.01)
        hvd.allreduce(np.ones(10), name="gradient")
        state.step += 1
        state.commit()


run_fn(train, initialize_again)(state)
say("done", hvd.size(), state.step)
