"""A training in an elastic job that commits each step, and the same training without a job as its reference."""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tests.harness import program_text
from tests.harness.elastic_launcher import PRELOADS, launched

PROGRAM = program_text("tests/harness/programs/in_place_training.py")


# All ranks train on the same batch in each step, so that the average does not depend on their number.
def make(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.to(device)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss(model: torch.nn.Module, step: int, device: str) -> torch.Tensor:
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(device)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


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
    model, optimizer = make(device)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step, device).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def program(
    steps: int,
    failure: tuple[int, int, str] | None = None,
    *,
    pause: float = 0.0,
    rollback: bool = False,
    device: str = "cpu",
) -> list[str]:
    """The arguments of Python that run the program. ``failure``: a process, and the step and moment at which it kills
    itself; ``pause``: seconds of each step; ``rollback``: of the state; ``device``: of the model."""
    given = {"failure": failure or (-1, -1, ""), "steps": steps, "pause": pause}
    given |= {"rollback": rollback, "device": device}
    return ["-c", PROGRAM, json.dumps(given)]


def run_with_failure(
    folder: Path, victim: int, step: int, moment: str, steps: int, *, rollback: bool, device: str
) -> None:
    """Run the program in a job of three processes, of which one kills itself, and check the job."""
    arguments = program(steps, (victim, step, moment), rollback=rollback, device=device)
    path = folder / "parameters"
    code, out, err = launched(
        *("-np", 3, "--min-np", 2, sys.executable, *arguments),
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
