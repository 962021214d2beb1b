"""A training in an elastic job that commits each step, and the same training without a job as its reference."""

import hashlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.harness.elastic_launcher import PRELOADS, launched

# All ranks train on the same batch in each step, so that the average does not depend on their number.
TRAINING = """
import torch

def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.to(DEVICE)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def loss(model, step):
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
"""

PROGRAM = (
    "DEVICE = {device!r}\n"
    + TRAINING
    + """
import hashlib, os, signal, sys, time
import horoplug.torch as hvd

ME = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])
SIZE = int(os.environ["FULL_SIZE"])
VICTIM, STEP, MOMENT = {failure!r}

model, plain = make()
hvd.init()
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, rollback={rollback}, step=0, made=0)

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
            time.sleep(0.02)
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
final = [p.detach().cpu() for p in model.parameters()]
bits = b"".join(p.numpy().tobytes() for p in final)
sys.stdout.write(f"process {{ME}} of {{hvd.size()}} made {{state.made}} hash {{hashlib.sha256(bits).hexdigest()}}\\n")
if hvd.rank() == 0:
    torch.save(final, os.environ["PARAMETERS"])
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


def undisturbed(steps: int, device: str = "cpu") -> list[torch.Tensor]:
    """The parameters after so many steps of one process."""
    names: dict[str, Any] = {"DEVICE": device}
    exec(TRAINING, names)
    model, optimizer = names["make"]()
    for step in range(steps):
        optimizer.zero_grad()
        names["loss"](model, step).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def program(
    steps: int,
    failure: tuple[int, int, str] | None = None,
    *,
    pause: float = 0.0,
    rollback: bool = False,
    device: str = "cpu",
) -> str:
    """The program. ``failure``: a process, and the step and moment at which it kills itself; ``pause``: seconds of each
    step; ``rollback``: of the state; ``device``: of the model."""
    return PROGRAM.format(
        failure=failure or (-1, -1, ""), steps=steps, pause=pause, rollback=rollback, device=device
    )


def run_with_failure(
    folder: Path, victim: int, step: int, moment: str, steps: int, *, rollback: bool, device: str
) -> None:
    """Run the program in a job of three processes, of which one kills itself, and check the job."""
    text = program(steps, (victim, step, moment), rollback=rollback, device=device)
    path = folder / "parameters"
    code, out, err = launched(
        *("-np", 3, "--min-np", 2, sys.executable, "-c", text),
        PARAMETERS=str(path),
        FULL_SIZE="3",
        preload=PRELOADS["torch"] if device == "cpu" else "",
    )
    assert code == 0, err
    check_job(out, path, {0, 1, 2} - {victim}, steps, device)


def check_job(out: str, parameters: Path, survivors: set[int], steps: int, device: str) -> None:
    """Check that three processes have ended the training, the survivors among them, with the same parameters, bit for
    bit, which are those of an undisturbed run; and that no step was lost or made twice.

    ``out``: the job's output; ``parameters``: the file that the program has written."""
    found = ends(out)
    assert found.keys() == survivors | {3}
    saved = torch.load(parameters)
    bits = hashlib.sha256(b"".join(p.numpy().tobytes() for p in saved)).hexdigest()
    assert set(found.values()) == {(3, steps, bits)}
    for ours, reference in zip(saved, undisturbed(steps, device), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
