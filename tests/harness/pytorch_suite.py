"""Runs PyTorch's own suite (tests/torch/c10d/pytorch_suite.py), and reads the table of its cases that differ."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.support import environment

FOLDER = ROOT / "tests" / "torch" / "c10d"

BACKENDS = {
    "Gloo": {"BACKEND": "gloo", "HOROPLUG_AS_GLOO": "0"},
    "horoplug in place of Gloo": {"BACKEND": "gloo", "HOROPLUG_AS_GLOO": "1"},
    "horoplug": {"BACKEND": "horoplug", "HOROPLUG_AS_GLOO": "0"},
}
"""What the suite can run on. It skips the cases that ask for Gloo by name if BACKEND is another one."""


def run(
    ranks: int, backend: str, cases: Sequence[str] = (), seconds: float = 600.0
) -> tuple[dict[str, str], str]:
    """The outcome of each case (passes, fails, is skipped) on one of BACKENDS, and what the suite printed. ``cases``:
    patterns of names; none: all. Raises TimeoutError after ``seconds``, when all processes have been killed."""
    with tempfile.NamedTemporaryFile("r", prefix="horoplug-suite-") as results:
        variables = {"WORLD_SIZE": str(ranks), "RESULTS": results.name, **BACKENDS[backend]}
        process = subprocess.Popen(
            [sys.executable, str(FOLDER / "pytorch_suite.py"), *(f"-k{case}" for case in cases)],
            env=environment() | variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the suite and the ranks that it has forked
            output, _ = process.communicate(timeout=scaled(20))
            raise TimeoutError(f"not done after {seconds:g} s:\n{output[-4000:]}") from None
        return dict(line.strip().split(" ", 1) for line in results), output


def differences(text: str | None = None) -> dict[str, dict[str, Any]]:
    """The table: for each case that passes with Gloo but not with horoplug in its place, what happens, for how many
    ranks, and why."""
    rows = {}
    for line in (text or (FOLDER / "differences.md").read_text()).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            case, outcome, ranks, why = cells
            numbers = [int(number) for number in ranks.split(",")]
            rows[case.strip("`")] = {"outcome": outcome, "ranks": numbers, "why": why}
    return rows
