"""Finds mistakes in a command before anything is started. Each is a :class:`UsageError` with a one-line message."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from .terms import COMMAND_LINE, Terms

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?$")
_WITH_VALUE = "WX"  # Python's own flags that take a value
_STDIN = "-"
_SHELL = re.compile(r"(ba|da|z|k|mk)?sh$")
_LONG_WITH_VALUE = ("--rcfile", "--init-file")  # of shells
# Programs that run the command that follows their own arguments.
_WRAPPERS = re.compile(r"(env|nice|ionice|nohup|stdbuf|setsid|taskset|numactl|timeout|chrt)$")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class UsageError(Exception):
    """The command line is wrong; the text is one line for the user, in the terms of the front end."""

    def __init__(self, text: str | Callable[[Terms], str]) -> None:
        self.text = text if callable(text) else lambda _: text
        super().__init__(self.text(COMMAND_LINE))


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
        if _ASSIGNMENT.match(program):
            rest = " ".join(command[1:2]) or "python"
            raise UsageError(
                f"{program} is not a program: put variables before horovodrun, or write env {program} {rest}"
            )
        if Path(program).is_file() and os.sep in program:
            raise UsageError(f"{program} is not executable (chmod +x, or python {program})")
        if Path(program).is_file() and program.endswith(".py"):
            raise UsageError(f"{program} is not a program; did you mean python {program}?")
        raise UsageError(f"there is no program {program!r}")
    if _PYTHON.match(os.path.basename(program)):
        script = python_script(command[1:])
        if script is not None and not os.path.exists(script):
            raise UsageError(f"there is no script {script!r}")


def check_folder() -> None:
    """Check that the current folder exists, in which ranks start. Errors: UsageError."""
    try:
        os.getcwd()
    except OSError:
        raise UsageError(
            "the current folder does not exist any more: change to another one"
        ) from None


def reads_program(command: Sequence[str]) -> str | None:
    """The interpreter in a command that reads its program from standard input; None: there is none.

    Python and shells are known, also behind programs such as ``env``."""
    for at, word in enumerate(command):
        name = os.path.basename(word)
        arguments = command[at + 1 :]
        if _PYTHON.match(name):
            return name if _python_program(arguments) == _STDIN else None
        if _SHELL.match(name):
            return name if _shell_reads_program(arguments) else None
        if at == 0 and not _WRAPPERS.match(name):
            return None
    return None


def python_script(arguments: Sequence[str]) -> str | None:
    """The script that Python would run with these arguments; None for ``-m``, ``-c``, stdin or no script."""
    program = _python_program(arguments)
    return None if program == _STDIN else program


def _python_program(arguments: Sequence[str]) -> str | None:
    """As :func:`python_script`, but :data:`_STDIN` if Python would read its program from there."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return rest[0] if rest else _STDIN
        if not argument.startswith("-") or argument == _STDIN:
            return argument
        if argument.startswith("--help") or argument == "--version":
            return None
        if argument.startswith("--"):
            rest = rest[1:]  # --check-hash-based-pycs, the only long option, has a value
            continue
        for position, letter in enumerate(argument[1:], start=1):
            if letter in "mchV?":
                return None
            if letter in _WITH_VALUE:
                if position == len(argument) - 1:
                    rest = rest[1:]
                break
    return _STDIN


def _shell_reads_program(arguments: Sequence[str]) -> bool:
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-", "--"):
            return not rest
        if argument[:1] not in ("-", "+"):
            return False
        if argument in ("--help", "--version"):
            return False
        if argument in _LONG_WITH_VALUE:
            rest = rest[1:]
        elif not argument.startswith("--"):
            if "c" in argument and argument[0] == "-":
                return False
            if "s" in argument and argument[0] == "-":
                return True
            if argument[-1] in "oO":
                rest = rest[1:]
    return True
