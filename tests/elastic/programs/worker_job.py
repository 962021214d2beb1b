import json
import os
import sys

from horoplug.runner.worker_job import enter

variables, die_at = json.loads(sys.stdin.read())
enter(variables)
import numpy as np

import horoplug.numpy as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn

hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0)


def train(state):
    while state.step < 20 or (hvd.size() < 3 and state.step < 100000):
        if state.step == die_at:
            os.kill(os.getpid(), 9)
        state.total += float(hvd.allreduce(np.ones(1), op=hvd.Sum, name="ones")[0]) / hvd.size()
        state.step += 1
        state.commit()
    return state.step, state.total


step, total = run_fn(train, initialize_again)(state)
print(hvd.rank(), hvd.size(), os.environ["HOROVOD_HOSTNAME"], step == total, file=sys.stderr)
