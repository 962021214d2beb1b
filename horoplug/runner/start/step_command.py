"""How a scheduler runs one task on each of the nodes of the job in which the launcher runs."""

from __future__ import annotations

import abc
import dataclasses
import os
import re
from collections.abc import Sequence
from typing import ClassVar

# What a task needs to start Python. The other variables of the ranks travel to the agent.
# fmt: off
EXPORTED = [
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "PYTHONPATH", "PYTHONHOME",
    "VIRTUAL_ENV", "CONDA_PREFIX",
]
# fmt: on


@dataclasses.dataclass(frozen=True)
class StepCommand(abc.ABC):
    """The scheduler's program that starts the tasks. Its standard input reaches all of them."""

    program: str
    python: str
    """Python on the other nodes."""

    program_name: ClassVar[str]
    """The program's name on the PATH."""
    name: ClassVar[str]
    """Its name in messages, and before its own lines."""
    task_ended: ClassVar[re.Pattern[str]]
    """A line of the program about the end of tasks. The first group has their nodes, in Slurm's notation."""
    cancelled: ClassVar[str]
    """A word in the line that says that the scheduler has ended the step."""
    node_variable: ClassVar[str]
    """The variable that tells a task the name of its node; empty: it is the name of the host."""

    @abc.abstractmethod
    def command(self, nodes: Sequence[str], module: str) -> list[str]:
        """The command that runs a module of Python as one task on each node. Errors: OSError."""

    def environment(self) -> dict[str, str]:
        """The environment of the program."""
        return dict(os.environ)
