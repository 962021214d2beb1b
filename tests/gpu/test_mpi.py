"""GPU arrays moved by the collectives of MPI, under mpirun. The GPUs are simulated and their memory is host memory, so
that an MPI without CUDA support accepts it, as HOROPLUG_MPI_CUDA=1 declares. Memory that MPI reads too early has wrong
values."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from horoplug._native import MpiOnGpu
from horoplug.mpi import cuda as mpi_cuda
from tests.harness import program_text, simulated_gpu
from tests.harness.mpi_jobs import find, finish, mpirun, no_files_of_mpi, on_hosts
from tests.harness.support import NO_LIMITS, until

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi"]  # fixture


# Not Intel MPI: its mpirun starts slowly, and the code between GPU and MPI is the same for all MPIs.
@pytest.fixture(params=["openmpi", "mpich"])
def place(request):
    return find(request.param)


def start(place, folder: Path, script: str, *args: str, np: int = 2, options=(), **variables: str):
    """Start ranks alternately on two host names of this machine. They share a GPU, so that NCCL cannot be used."""
    devices = folder / "gpus"
    devices.mkdir()
    simulated = simulated_gpu.environment(devices, gpu_delay=300)
    library_path = simulated["LD_LIBRARY_PATH"], place.environment()["LD_LIBRARY_PATH"]
    simulated["LD_LIBRARY_PATH"] = os.pathsep.join(library_path)
    variables = {"HOROVOD_CPU_OPERATIONS": "mpi", **simulated, **variables}
    script = on_hosts("import sys\n" + script)
    return mpirun(place, script, *args, np=np, options=options, **variables)


def done(output: str) -> list[str]:
    return sorted(re.findall(r"rank (\d) is done", output))


def algorithms_used(timeline: Path) -> dict[str, set[str]]:
    """By operation on a GPU: the algorithms that the timeline names for it."""
    found: dict[str, set[str]] = {}
    for event in json.loads(timeline.read_text()):
        name = event.get("name", "")
        if name.startswith("GPU_") and "algorithm" in event.get("args", {}):
            found.setdefault(name.removeprefix("GPU_"), set()).add(event["args"]["algorithm"])
    return found


MOVES = {"BROADCAST", "ALLGATHER", "ALLTOALL"}
REDUCES = {"ALLREDUCE", "REDUCESCATTER"}

OPERATIONS = program_text("tests/gpu/programs/mpi_operations.py")


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_mpi_operations_on_gpu_arrays(place, tmp_path, level):
    """The results equal those on the host; below thread level ``multiple``, the MPI thread calls MPI."""
    if (place.name, level) == ("openmpi", "serialized"):
        pytest.skip("one MPI is enough: the code between the threads does not depend on MPI")
    timeline = tmp_path / "timeline.json"
    job = start(
        place,
        tmp_path,
        OPERATIONS,
        np=3,
        HOROPLUG_ALGORITHM="mpi",
        HOROPLUG_MPI_CUDA="1",
        HOROVOD_TIMELINE=str(timeline),
        MPI4PY_RC_THREAD_LEVEL=level,
    )
    status, output = finish(job)
    assert status == 0, output
    assert done(output) == ["0", "1", "2"], output
    found = algorithms_used(timeline)
    assert all("mpi" in found[kind] for kind in MOVES | REDUCES), found


SAYING = program_text("tests/gpu/programs/mpi_saying.py")


def test_every_rank_checks_whether_mpi_is_cuda_aware(place, tmp_path):
    """The installed libraries report that they are not CUDA-aware. A log line says why MPI moves no GPU tensors."""
    job = start(place, tmp_path, SAYING, str(tmp_path), HOROVOD_LOG_LEVEL="info")
    status, output = finish(job)
    assert status == 0, output
    assert done(output) == ["0", "1"], output
    # One line for each rank.
    assert output.count("not moved by MPI: it does not say that it takes GPUs' memory") == 2, output
    assert output.count("not moved by MPI: on rank 1, it does not say") == 2, output
    for name in "asked", "some":
        found = algorithms_used(tmp_path / f"{name}.json")
        assert set().union(*found.values()) == {"staged"}, (name, found)
    # Without a forced algorithm, MPI is preferred to staging through host memory.
    found = algorithms_used(tmp_path / "yes.json")
    by_mpi = MOVES | REDUCES if place.name == "mpich" else MOVES
    assert {kind for kind in found if "mpi" in found[kind]} == by_mpi, found
    assert ("not reduced by it" in output) == (place.name == "openmpi"), output


def test_variable_overrides_the_report_of_mpi(tmp_path):
    job = start(find("mpich"), tmp_path, SAYING, str(tmp_path), "differ", HOROPLUG_ALGORITHM="mpi")
    status, output = finish(job)
    assert status == 0, output
    # Rank 0 warns, because MPI was requested.
    assert output.count("not moved by MPI: on rank 0, it does not say") == 1, output
    assert set().union(*algorithms_used(tmp_path / "differ.json").values()) == {"staged"}


ENDING = program_text("tests/gpu/programs/mpi_ending.py")


@pytest.mark.parametrize("operation", ["allreduce", "alltoall"])
def test_rank_that_dies_is_named(place, tmp_path, operation):
    """All other ranks get an error that names the rank, and all processes end although MPI still uses GPU memory.
    MPICH's mpirun may end them before they print the error."""
    kept = place.name == "openmpi"
    job = start(
        place,
        tmp_path,
        ENDING,
        str(tmp_path),
        operation,
        np=3,
        options=["--continuous" if kept else "-disable-auto-cleanup"],
        HOROPLUG_ALGORITHM="mpi",
        HOROPLUG_MPI_CUDA="1",
        # Open MPI's MPI_Finalize may wait for the dead rank.
        **NO_LIMITS | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"},
    )
    file = tmp_path / "pid"
    until(lambda: file.exists() or job.poll() is not None, timeout=40)
    assert job.poll() is None, job.communicate()[0]
    os.kill(int(file.read_text()), signal.SIGKILL)
    status, output = finish(job)
    assert kept or status != 0, output
    failures = re.findall(r"failed: (.*)", output)
    assert len(failures) == 2 or not kept, output
    assert all("rank 1 has died" in text for text in failures), output


# ---- GPU support that MPI libraries report ---------------------------------------------------------------------------


class Info:
    def __init__(self, kinds):
        self.Get = {"mpi_memory_alloc_kinds": kinds}.get
        self.Free = lambda: None


DIES = object()


@pytest.mark.parametrize(
    ("library", "version", "kinds", "function", "says", "takes"),
    [
        ("Open MPI v5.0.11", (3, 1), None, 1, True, MpiOnGpu.MOVES),
        ("Open MPI v5.0.11", (3, 1), None, 0, False, MpiOnGpu.NOTHING),
        ("Open MPI v4.1.8", (3, 1), None, None, None, MpiOnGpu.NOTHING),
        # Open MPI 6 lists only the memory kinds that were requested from mpirun.
        ("Open MPI v6.0.0", (4, 1), "mpi,system", 1, True, MpiOnGpu.MOVES),
        (
            "MPICH Version:      5.0.2",
            (5, 0),
            "mpi,system,cuda:device,cuda",
            DIES,
            True,
            MpiOnGpu.ALL,
        ),
        ("MPICH Version:      5.0.2", (5, 0), "mpi, cuda:device", DIES, True, MpiOnGpu.ALL),
        (
            "MPICH Version:      5.0.2",
            (5, 0),
            "mpi,system,cuda:managed",
            0,
            False,
            MpiOnGpu.NOTHING,
        ),
        ("MPICH Version:      5.0.2", (5, 0), "mpi,system", None, False, MpiOnGpu.NOTHING),
        ("MPICH Version:      4.0", (4, 0), None, 1, True, MpiOnGpu.ALL),
        ("MPICH Version:      3.4.3", (3, 1), None, DIES, None, MpiOnGpu.NOTHING),
        (
            "MPI VERSION    : CRAY MPICH version 8.1.27",
            (3, 1),
            None,
            DIES,
            None,
            MpiOnGpu.NOTHING,
        ),
        ("MVAPICH2 Version      :	2.3.7", (3, 1), None, 1, True, MpiOnGpu.MOVES),
        ("Intel(R) MPI Library 2021.19", (4, 1), "mpi,system", 1, True, MpiOnGpu.NOTHING),
    ],
)
def test_gpu_support_of_each_mpi(monkeypatch, library, version, kinds, function, says, takes):
    def query():
        assert function is not DIES
        return function

    MPI = SimpleNamespace(
        Get_library_version=lambda: library,
        Get_version=lambda: version,
        COMM_WORLD=SimpleNamespace(Get_info=lambda: Info(kinds)),
    )
    functions = {} if function is None else {"MPIX_Query_cuda_support": query}
    monkeypatch.setattr(mpi_cuda.thread, "library", lambda MPI: SimpleNamespace(**functions))
    assert mpi_cuda.reports_cuda_aware(MPI) is says
    assert mpi_cuda.gpu_support(MPI) == takes
    assert (mpi_cuda.gpu_support(MPI, False), mpi_cuda.gpu_support(MPI, True)) == (
        MpiOnGpu.NOTHING,
        MpiOnGpu.ALL,
    )
    assert "CUDA-aware" in mpi_cuda.describe(MPI)
