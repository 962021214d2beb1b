import socket
import time

import numpy as np

import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn


def train(state):
    state.sizes = [*state.sizes, hvd.size()]
    address = socket.gethostbyname(socket.gethostname() + ".train-elastic")
    for step in range(1 << 30):
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="step") == hvd.size()
        state.step += 1
        state.commit()
        if step == 1:  # all ranks have committed the first step
            print(f"rank {hvd.rank()} of {hvd.size()} at {address}", flush=True)
        if state.sizes[-3:] == [2, 1, 2] and step == 20:
            return
        time.sleep(0.02)


hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, sizes=[])
run_fn(train, initialize_again)(state)
print(f"rank {hvd.rank()} of {hvd.size()} is done after {state.step} steps of {state.sizes}")
