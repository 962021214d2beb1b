"""What can be found wrong before anything is started. Errors are :class:`UsageError`, one line each."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?$")
_WITH_VALUE = "WX"  # Python's own flags that take a value


class UsageError(Exception):
    """The command line is wrong; the text is one line for the user."""


def slots(hosts: str | None) -> int | None:
    """Processes that ``-H`` has room for; None if there is no limit.

    ``hosts`` is ``name:N,name:N``, where every name has to mean this machine, for now."""
    if hosts is None:
        return None
    total = 0
    for part in hosts.split(","):
        name, _, count = part.strip().rpartition(":")
        if not name or not count.isdecimal() or int(count) == 0:
            raise UsageError(
                f"-H wants host:slots,host:slots, for example localhost:4, not {hosts!r}"
            )
        if not is_this_host(name.strip("[]")):
            raise UsageError(
                f"{name} is another host, and remote hosts are not available yet; use localhost:{count}"
            )
        total += int(count)
    return total


def is_this_host(name: str) -> bool:
    """Whether a name means this machine. Nothing is looked up in the network."""
    own = socket.gethostname()
    known = {"localhost", "localhost.localdomain", "::1", own.lower(), own.lower().split(".")[0]}
    return name.lower() in known or bool(re.fullmatch(r"127(\.\d{1,3}){3}", name))


def check_room(processes: int, room: int | None, hosts: str | None) -> None:
    """Whether ``-np`` fits into ``-H``."""
    if room is not None and processes > room:
        raise UsageError(
            f"-np {processes} is more than -H {hosts} has: {room} slot{'s' if room > 1 else ''}"
        )


def check_command(command: Sequence[str]) -> None:
    """Whether the program is there and, for Python, its script."""
    if not command:
        raise UsageError(
            "there is no command to run; for example: horovodrun -np 2 python train.py"
        )
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
            rest = rest[1:]  # --check-hash-based-pycs has a value, and there is no other
            continue
        for position, letter in enumerate(argument[1:], start=1):
            if letter in "mc":
                return None
            if letter in _WITH_VALUE:
                if position == len(argument) - 1:
                    rest = rest[1:]
                break
    return None
