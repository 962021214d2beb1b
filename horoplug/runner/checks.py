"""Finds mistakes in a command before anything is started. Each is a :class:`UsageError` with a one-line message."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?$")
_WITH_VALUE = "WX"  # Python's own flags that take a value


class UsageError(Exception):
    """The command line is wrong; the text is one line for the user."""


def check_command(command: Sequence[str], *, here: bool = True) -> None:
    """Check that the program exists and, for Python, its script. ``here``: whether ranks run on this host.

    Errors: UsageError."""
    if not command:
        raise UsageError(
            "there is no command to run; for example: horovodrun -np 2 python train.py"
        )
    if not here:
        return
    program = command[0]
    if shutil.which(program) is None:
        if Path(program).is_file() and os.sep in program:
            raise UsageError(f"{program} is not executable (chmod +x, or python {program})")
        if Path(program).is_file() and program.endswith(".py"):
            raise UsageError(f"{program} is not a program; did you mean python {program}?")
        raise UsageError(f"there is no program {program!r}")
    if _PYTHON.match(os.path.basename(program)):
        script = python_script(command[1:])
        if script is not None and not os.path.exists(script):
            raise UsageError(f"there is no script {script!r}")


def python_script(arguments: Sequence[str]) -> str | None:
    """The script that Python would run with these arguments; None for ``-m``, ``-c``, stdin or no script."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return rest[0] if rest else None
        if not argument.startswith("-"):
            return argument
        if argument == "-" or argument.startswith("--help") or argument == "--version":
            return None
        if argument.startswith("--"):
            rest = rest[1:]  # --check-hash-based-pycs, the only long option, has a value
            continue
        for position, letter in enumerate(argument[1:], start=1):
            if letter in "mc":
                return None
            if letter in _WITH_VALUE:
                if position == len(argument) - 1:
                    rest = rest[1:]
                break
    return None
