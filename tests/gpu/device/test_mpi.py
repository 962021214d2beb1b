"""CuPy arrays are reduced and moved by MPI's collectives on GPU memory, with each MPI that supports it."""

import json

import pytest

from tests.gpu.device.cupy_checks import need
from tests.harness import program_text
from tests.harness.mpi_jobs import find, finish, mpirun, no_files_of_mpi, on_hosts

__all__ = ["no_files_of_mpi"]  # fixture

SCRIPT = program_text("tests/gpu/device/programs/mpi.py")


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_cupy_operations_over_mpi(name, tmp_path):
    if reason := need():
        pytest.skip(reason)
    pytest.importorskip("mpi4py")
    timeline = tmp_path / "timeline.json"
    variables = {"HOROPLUG_ALGORITHM": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}
    # Two host names on one machine with one GPU.
    script = on_hosts(SCRIPT)
    status, output = finish(mpirun(find(name), script, str(timeline), **variables), 120)
    if "not CUDA-aware" in output:
        pytest.skip(f"{name} does not say that it is CUDA-aware")
    assert status == 0, output
    assert output.count("done") == 2, output
    events = json.loads(timeline.read_text())
    by_mpi = {e["name"] for e in events if e.get("args", {}).get("algorithm") == "mpi"}
    assert {"GPU_BROADCAST", "GPU_ALLGATHER", "GPU_ALLTOALL"} <= by_mpi, by_mpi
