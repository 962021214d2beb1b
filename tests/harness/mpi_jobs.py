"""Jobs under the mpirun of an MPI that is installed in build/mpi."""

import contextlib
import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.harness.support import environment

sys.path.insert(0, str(ROOT / "benchmarks"))

from harness import mpi

from tests.harness.limits import scaled

KINDS = ["openmpi", "mpich", "impi"]

# Distributes the ranks round-robin over a number of hosts; the beginning of a script.
ON_HOSTS = """
import os
from mpi4py import MPI
os.environ["HOROVOD_HOSTNAME"] = f"host{MPI.COMM_WORLD.rank % %d}"
"""


def on_hosts(script: str, hosts: int = 2) -> str:
    return ON_HOSTS.replace("% %d", f"% {hosts}") + script


def find(name: str) -> mpi.Mpi:
    """The MPI of this name; skips the test if it is not installed."""
    found = mpi.find(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make mpi")
    return found


def between_hosts(variables: dict[str, str]) -> dict[str, str]:
    """The variables for a job on several hosts; skips the test if the MPI cannot simulate one."""
    # On several hosts, mpirun counts slots.
    wanted = {name: text for name, text in variables.items() if "oversub" not in name + text}
    if wanted.pop("I_MPI_FABRICS", ""):
        try:
            ctypes.CDLL("libfabric.so.1")
        except OSError:
            pytest.skip("Intel's wheel has nothing for networks: apt-get install libfabric1")
        wanted["FI_PROVIDER"] = "tcp"
    return wanted


def files_of_mpi() -> set[Path]:
    """The files of MPI libraries in shared memory."""
    folder = Path("/dev/shm")
    return {
        file
        for pattern in ("mpich_shm_*", "sm_segment.*", "Intel_MPI_*")
        for file in folder.glob(pattern)
    }


def remove_unused(files: set[Path]) -> None:
    """Remove those of the files in shared memory that no process has mapped."""
    if not files:
        return
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            found = re.findall(r" (/dev/shm/\S+)$", maps.read_text(), re.MULTILINE)
            mapped |= {Path(path) for path in found}
    for file in files - mapped:
        file.unlink(missing_ok=True)


@pytest.fixture(params=KINDS)
def place(request):
    """Each installed MPI."""
    return find(request.param)


@pytest.fixture(autouse=True)
def no_files_of_mpi():
    """Remove files that MPI leaves in shared memory if a process is killed or the MPI has no mpirun of its own. Applies
    to all tests of a module that imports this fixture. Jobs of other tests keep their files."""
    before = files_of_mpi()
    yield
    remove_unused(files_of_mpi() - before)


def mpirun(
    place: mpi.Mpi,
    script: str,
    *args: str,
    np: int = 2,
    options: Sequence[str] = (),
    **variables: str,
) -> subprocess.Popen[str]:
    """Start ``python -c script args`` under mpirun."""
    return subprocess.Popen(
        [str(place.mpirun), *options, "-np", str(np), sys.executable, "-c", script, *args],
        env=environment() | place.environment() | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str]:
    """Exit code and output of a job; fails the test if it does not end in time."""
    try:
        output, _ = process.communicate(timeout=scaled(timeout))
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate(timeout=scaled(20))
        pytest.fail(f"not done after {timeout:g} s:\n{output}", pytrace=False)
    return process.returncode, output
