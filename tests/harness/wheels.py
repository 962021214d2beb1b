"""The wheels that tests install, and commands for them."""

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.harness import ROOT
from tests.harness.limits import scaled

WHEELS = Path(os.environ.get("HOROPLUG_TEST_WHEELS", ROOT / "dist" / "wheels"))


def wheel(tag: str, machine: str = os.uname().machine) -> Path:
    """The wheel for a Python, such as ``cp311``, and an architecture."""
    (found,) = WHEELS.glob(f"*-{tag}-manylinux*_{machine}.whl")
    return found


def run(*command: object, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command with its output. ``check``: it must end with code 0."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(300),
        **options,
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
