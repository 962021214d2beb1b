"""A training without rollback in an elastic job, and the same training without a job as its reference."""

import re
from typing import Any, NamedTuple

import torch

# All ranks train on the same batch in each step, so that the average does not depend on their number.
TRAINING = """
import torch

def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def loss(model, step):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
"""

PROGRAM = (
    TRAINING
    + """
import hashlib, os, signal, sys, time
import horoplug.torch as hvd

ME = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])
SIZE = int(os.environ["FULL_SIZE"])
VICTIM, STEP, MOMENT = {failure!r}

model, plain = make()
hvd.init()
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, rollback=False, step=0, made=0)

def fail(moment):
    if (ME, state.step, moment) == (VICTIM, STEP, MOMENT):
        os.kill(os.getpid(), signal.SIGKILL)

if MOMENT == "backward":
    next(model.parameters()).register_hook(lambda _: fail("backward"))
if MOMENT == "reset":
    state.register_reset_callbacks([lambda: fail("reset")])

@hvd.elastic.run
def train(state):
    while state.step < {steps}:
        if state.step == {steps} - 10 and hvd.size() < SIZE:  # wait for replacements
            state.commit()
            continue
        optimizer.zero_grad()
        fail("forward")
        time.sleep({pause})
        loss(model, state.step).backward()
        optimizer.synchronize()
        fail("reduced")
        with optimizer.skip_synchronize():
            optimizer.step()
        state.step += 1
        state.made += 1
        fail("step")
        state.commit()

train(state)
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
sys.stdout.write(f"process {{ME}} of {{hvd.size()}} made {{state.made}} hash {{hashlib.sha256(bits).hexdigest()}}\\n")
if hvd.rank() == 0:
    torch.save([p.detach() for p in model.parameters()], os.environ["PARAMETERS"])
"""
)


class End(NamedTuple):
    """How a process has ended: the size of the job, the number of steps that its state has got, and a hash of its
    parameters."""

    size: int
    made: int
    bits: str


def ends(out: str) -> dict[int, End]:
    """How the processes of a job have ended, by number, from the job's output."""
    found = re.findall(r"process (\d+) of (\d+) made (\d+) hash (\w+)", out)
    return {int(process): End(int(size), int(made), bits) for process, size, made, bits in found}


def undisturbed(steps: int) -> list[torch.Tensor]:
    """The parameters after so many steps of one process."""
    names: dict[str, Any] = {}
    exec(TRAINING, names)
    model, optimizer = names["make"]()
    for step in range(steps):
        optimizer.zero_grad()
        names["loss"](model, step).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def program(steps: int, failure: tuple[int, int, str] | None = None, *, pause: float = 0.0) -> str:
    """The program. ``failure``: a process, and the step and moment at which it kills itself; ``pause``: seconds of each
    step."""
    return PROGRAM.format(failure=failure or (-1, -1, ""), steps=steps, pause=pause)
