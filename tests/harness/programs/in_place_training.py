import hashlib
import json
import os
import signal
import sys
import time

import torch

import horoplug.torch as hvd
from tests.harness.in_place_training import loss, make

ME = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])
SIZE = int(os.environ["FULL_SIZE"])
GIVEN = json.loads(sys.argv[1])  # see tests/harness/in_place_training.py
DEVICE, STEPS, PAUSE, ROLLBACK = (GIVEN[name] for name in ("device", "steps", "pause", "rollback"))
VICTIM, STEP, MOMENT = GIVEN["failure"]

model, plain = make(DEVICE)
hvd.init()
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, rollback=ROLLBACK, step=0, made=0)


def fail(moment):
    if (ME, state.step, moment) == (VICTIM, STEP, MOMENT):
        os.kill(os.getpid(), signal.SIGKILL)


if MOMENT == "backward":
    next(model.parameters()).register_hook(lambda _: fail("backward"))
if MOMENT == "reset":
    state.register_reset_callbacks([lambda: fail("reset")])


@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        if state.step == STEPS - 10 and hvd.size() < SIZE:  # wait for replacements
            time.sleep(0.02)
            state.commit()
            continue
        optimizer.zero_grad()
        fail("forward")
        time.sleep(PAUSE)
        loss(model, state.step, DEVICE).backward()
        optimizer.synchronize()  # type: ignore[attr-defined]
        fail("reduced")
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]
            optimizer.step()
        state.step += 1
        state.made += 1
        fail("step")
        state.commit()


train(state)
final = [p.detach().cpu() for p in model.parameters()]
bits = b"".join(p.numpy().tobytes() for p in final)
sys.stdout.write(
    f"process {ME} of {hvd.size()} made {state.made} hash {hashlib.sha256(bits).hexdigest()}\n"
)
if hvd.rank() == 0:
    torch.save(final, os.environ["PARAMETERS"])
