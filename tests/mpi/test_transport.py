"""Data between hosts over MPI point-to-point. The hosts are host names of ranks on one machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, program_text
from tests.harness.mpi_jobs import find, finish, mpirun, no_files_of_mpi, on_hosts, place
from tests.harness.support import NO_LIMITS

pytest.importorskip("mpi4py")
from tests.harness.limits import scaled
from tests.harness.mpi_programs import COLLECTIVES, ENDING, TRANSPORT, failures, kill, transports

__all__ = ["no_files_of_mpi", "place"]  # fixtures


# Not Intel MPI: it starts slowly, and the tested code is the same for all MPIs.
@pytest.fixture(params=["openmpi", "mpich"])
def one_of_two(request):
    return find(request.param)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithms", [",mpi", "ring,pairwise,doubling,hierarchical"], ids=["default", "forced"]
)
@pytest.mark.short("*default")
def test_collectives_over_mpi_point_to_point(place, algorithms):
    if algorithms.startswith("ring") and place.name == "impi":
        pytest.skip(
            "two MPIs are enough: the code between algorithm and MPI does not depend on MPI"
        )
    job = mpirun(place, on_hosts(COLLECTIVES), algorithms, np=4, HOROVOD_CPU_OPERATIONS="mpi")
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output


STANDARD = """
from horoplug.mpi.libraries import loaded_libraries
(library,) = loaded_libraries()
assert "libmpi_abi" in library, library
"""


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_mpi4py_of_the_mpi_standard_abi(name):
    """The job uses an mpi4py that supports only MPI's standard ABI."""
    found, abi = find(name), ROOT / "build/mpi/abi"
    if not (abi / ".installed").exists():
        pytest.skip("mpi4py for the standard ABI is not installed: make test-matrix")
    variables = found.environment() | {
        "MPI4PY_LIBMPI": str(found.prefix / "lib/libmpi_abi.so.1"),
        "MPI4PY_MPIABI": "",
        "PYTHONPATH": f"{abi}:{os.environ.get('PYTHONPATH', '')}",
        "HOROVOD_CPU_OPERATIONS": "mpi",
    }
    job = mpirun(found, on_hosts(STANDARD + COLLECTIVES), ",mpi", np=4, **variables)
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output


# ---- choice of the transport -----------------------------------------------------------------------------------------


@pytest.fixture
def mpich():
    return find("mpich")


@pytest.mark.parametrize(
    ("variables", "way"),
    [
        ({}, None),
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, "TCP"),
        ({"HOROVOD_CONTROLLER": "gloo"}, "TCP"),
        ({"HOROVOD_CONTROLLER": "gloo", "HOROPLUG_CPU_OPERATIONS": "mpi"}, "MPI"),
    ],
)
def test_transport_is_chosen_by_variables(mpich, variables, way):
    status, output = finish(
        mpirun(mpich, on_hosts(TRANSPORT), HOROVOD_LOG_LEVEL="info", **variables)
    )
    assert status == 0, output
    assert transports(output) in (["MPI"] * 2, ["TCP"] * 2), output
    if way is None:  # the faster transport, and rank 0 logs which one and why
        assert f"data between hosts goes over {transports(output)[0]}: MPICH" in output
    else:
        assert transports(output)[0] == way, output


def test_different_transport_settings_are_refused(mpich):
    script = on_hosts(
        'os.environ["HOROVOD_CPU_OPERATIONS"] = ["mpi", "gloo"][MPI.COMM_WORLD.rank]\n' + TRANSPORT
    )
    _, output = finish(mpirun(mpich, script))
    assert len(re.findall(r"refused: .*set HOROVOD_CPU_OPERATIONS alike", output)) == 2, output


@pytest.mark.parametrize("name", ["CPU_OPERATIONS", "CONTROLLER"])
def test_mpi_transport_needs_mpirun(monkeypatch, name):
    """A job that mpirun has not started cannot use MPI, unless it has a single process, which needs no transport.

    A process of its own: a daemon of Open MPI lives as long as the process that has initialized MPI without mpirun."""
    script = "import horoplug as hvd; hvd.init(); assert hvd.size() == 1; hvd.shutdown()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, f"HOROVOD_{name}": "mpi"},
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    assert done.returncode == 0, done.stderr

    import horoplug as hvd

    monkeypatch.setenv(f"HOROVOD_{name}", "mpi")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.raises(ValueError, match=f"HOROVOD_{name}=mpi.*mpirun"):
        hvd.init()


# ---- communicators ---------------------------------------------------------------------------------------------------

SETS = program_text("tests/mpi/programs/transport_sets.py")


def test_process_sets_from_mpi_communicators(one_of_two):
    status, output = finish(mpirun(one_of_two, on_hosts(SETS), np=4))
    assert status == 0, output
    assert output.count("done") == 4, output


# ---- ranks that die, stop or shut down -------------------------------------------------------------------------------


def start(
    place,
    folder: Path,
    end: str,
    algorithm: str = "",
    options=(),
    operation="allreduce",
    **variables: str,
):
    """Start three ranks, of which rank 1 ends in this way."""
    return mpirun(
        place,
        on_hosts(ENDING),
        str(folder),
        end,
        operation,
        np=3,
        options=options,
        HOROVOD_CPU_OPERATIONS="mpi",
        HOROPLUG_ALGORITHM=algorithm,
        **variables,
    )


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [
        ("allreduce", "pairwise"),
        *((operation, "mpi") for operation in ("allreduce", "broadcast", "allgather", "alltoall")),
    ],
)
def test_rank_that_dies_is_named(one_of_two, tmp_path, operation, algorithm):
    """All other ranks get an error that names it, and all processes end. MPICH's mpirun may end them before that."""
    kept = one_of_two.name == "openmpi"
    options = ["--continuous" if kept else "-disable-auto-cleanup"]
    # Open MPI's MPI_Finalize may wait for the dead rank.
    limits = NO_LIMITS | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
    job = start(one_of_two, tmp_path, "dies", algorithm, options, operation, **limits)
    kill(job, tmp_path, signal.SIGKILL)
    status, output = finish(job)
    assert kept or status != 0, output
    assert len(failures(output)) == 2 or not kept, output
    assert all("rank 1 has died" in text for text in failures(output)), output


@pytest.mark.parametrize("algorithm", ["pairwise", "mpi"])
def test_stopped_rank_is_named(mpich, tmp_path, algorithm):
    """The others fail, and do not wait for it in MPI_Finalize."""
    limit = f"{scaled(2):.0f}"
    job = start(mpich, tmp_path, "stops", algorithm, HOROVOD_GLOO_TIMEOUT_SECONDS=limit)
    pid = kill(job, tmp_path, signal.SIGSTOP)
    try:
        _, output = finish(job)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert f"MPI_Finalize has not returned for {limit} s" in output, output
    assert len(failures(output)) == 2, output
    # MPI's own collectives do not tell which rank is late.
    assert all(
        re.search(rf"no progress for {limit} s, waiting for ranks? [\d, -]*", text)
        for text in failures(output)
    )


def test_rank_that_shuts_down_is_named(one_of_two, tmp_path):
    status, output = finish(start(one_of_two, tmp_path, "leaves"))
    assert status == 0, output
    assert len(failures(output)) == 2, output
    assert all("rank 1" in text for text in failures(output)), output


@pytest.mark.parametrize("wanted", ["", "mpi"])
def test_mpi_carries_no_data_of_a_job_that_encrypts(wanted):
    """TCP does, or the request for MPI is refused."""
    script = on_hosts(TRANSPORT)
    job = mpirun(find("mpich"), script, HOROPLUG_ENCRYPT="1", HOROVOD_CPU_OPERATIONS=wanted)
    status, output = finish(job)
    assert status == 0, output
    if wanted:
        refusals = re.findall(r"refused: ValueError: (.+)", output)
        assert len(refusals) == 2, output
        assert all("CPU_OPERATIONS=mpi exclude each other" in line for line in refusals)
    else:
        assert transports(output) == ["TCP", "TCP"], output
