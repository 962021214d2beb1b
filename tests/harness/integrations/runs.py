"""Runs the programs of this folder on several ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.harness import ROOT
from tests.harness.support import environment

FOLDER = Path(__file__).resolve().parent
PATH = ROOT / "build" / "integrations"
SECONDS = 150


def run(
    command: Sequence[object],
    variables: dict[str, str] | None = None,
    *,
    code: int = 0,
    libraries: bool = True,
    seconds: int = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Every process that it leaves is killed when the time is over. ``libraries``: it needs
    those that make test-integrations installs."""
    if libraries and not PATH.is_dir():
        pytest.skip("make test-integrations installs the libraries")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(PATH), env["PYTHONPATH"]])
    # Nothing is downloaded, and no telemetry is sent.
    env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        ["timeout", "-k", "5", str(seconds), *map(str, command)],
        env=env | (variables or {}),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def horovodrun(size: int = 2) -> list[str]:
    return [sys.executable, "-m", "horoplug.runner", "-np", str(size), sys.executable]


def torchrun(size: int = 2, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={size}", *options),
    ]


def results(folder: Path, size: int = 2) -> list[dict]:
    """What the ranks have saved as RANK.pt; their parameters are equal."""
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for each in found[1:]:
        for name, value in found[0]["parameters"].items():
            assert torch.equal(value, each["parameters"][name]), f"{name} differs between ranks"
    return found


def assert_close(one: dict, other: dict, tolerance: float = 1e-5) -> None:
    """Assert that two runs end with the same parameters."""
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, value in one["parameters"].items():
        torch.testing.assert_close(
            value, other["parameters"][name], rtol=tolerance, atol=tolerance, msg=name
        )


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
