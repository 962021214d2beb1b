"""Programs that run under mpirun, and functions that parse their output."""

import os
import re
from pathlib import Path

import pytest

from tests.harness import program_text
from tests.harness.support import until

pytest.importorskip("mpi4py")

# Two ranks on each of two hosts. Inputs depend on the rank, and their sums on the order of addition.
COLLECTIVES = program_text("tests/harness/programs/mpi_programs_collectives.py")

TRANSPORT = program_text("tests/harness/programs/mpi_programs_transport.py")


def transports(output: str) -> list[str]:
    """The transport of each rank that ran TRANSPORT: MPI or TCP."""
    return re.findall(r"over (MPI|TCP),", output)


ENDING = program_text("tests/harness/programs/mpi_programs_ending.py")


def failures(output: str) -> list[str]:
    return re.findall(r"failed: (.*)", output)


def kill(job, folder: Path, number: int) -> int:
    """Send rank 1 a signal once it has begun. Returns its pid."""
    file = folder / "pid"
    until(lambda: file.exists() or job.poll() is not None, timeout=40)
    assert job.poll() is None, job.communicate()[0]
    pid = int(file.read_text())
    os.kill(pid, number)
    return pid
