"""MPI below the thread level "multiple": one thread of each process makes all MPI calls, or MPI is not used."""

import contextlib
import os
import re
import signal

import pytest

from tests.harness import program_text
from tests.harness.mpi_jobs import find, finish, mpirun, no_files_of_mpi, on_hosts
from tests.harness.mpi_programs import COLLECTIVES, ENDING, TRANSPORT, failures, kill, transports

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi"]  # a fixture


@pytest.fixture(params=["openmpi", "mpich"])
def one_of_two(request):
    return find(request.param)


@pytest.fixture
def mpich():
    return find("mpich")


def level(name: str) -> str:
    return f"import mpi4py; mpi4py.rc.thread_level = {name!r}\n"


# The beginning of a program that leaves the initialisation of MPI to horoplug. The ranks are assigned to two hosts by
# their numbers in the environment, since the program cannot ask MPI. A replacement for the module MPI records which
# threads use it.
LEFT_TO_HOROPLUG = program_text("tests/mpi/programs/levels_left_to_horoplug.py")


FORKS = """
pid = os.fork()
if pid == 0:
    atexit.unregister(at_the_end)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
"""


def finalized(output: str) -> int:
    return output.count("finalized True")


@pytest.mark.parametrize(
    ("mpi", "name", "algorithms"), [("openmpi", "funneled", ""), ("mpich", "serialized", ",mpi")]
)
def test_collectives_through_one_thread(mpi, name, algorithms):
    script = level(name) + LEFT_TO_HOROPLUG
    script += COLLECTIVES.replace("MPI.COMM_WORLD.rank", "number")
    job = mpirun(find(mpi), script, algorithms, np=4, HOROVOD_CPU_OPERATIONS="mpi")
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output
    assert finalized(output) == 4, output


@pytest.mark.parametrize("name", ["multiple", "serialized", "funneled", "single"])
def test_requested_thread_level_is_granted(mpich, name):
    """A process with horoplug has several threads, so it requests at least "funneled"."""
    script = level(name) + LEFT_TO_HOROPLUG + TRANSPORT + FORKS
    script += "sys.stdout.write(f'main {real.Is_thread_main()}\\n')"
    job = mpirun(mpich, script, HOROVOD_CPU_OPERATIONS="mpi", HOROVOD_LOG_LEVEL="info")
    status, output = finish(job)
    assert status == 0, output
    assert len(re.findall(f"over MPI, True {name == 'multiple'} False", output)) == 2, output
    assert (output.count("main False"), finalized(output)) == (2, 2), output
    granted = "funneled" if name == "single" else name
    assert f"thread level {granted})" in output
    said = output.count(
        f"I horoplug] [0]: MPI thread level '{granted}': calls go through one thread"
    )
    assert said == (0 if name == "multiple" else 1), output


def test_mpi4py_without_threads_gets_thread_level_funneled(mpich):
    """init() also accepts a communicator although MPI is not initialised yet."""
    script = "import mpi4py; mpi4py.rc.threads = False\n" + LEFT_TO_HOROPLUG
    script += TRANSPORT.replace("init()", "init(comm=real.COMM_WORLD)")
    script += "assert real.Query_thread() == real.THREAD_FUNNELED"
    status, output = finish(mpirun(mpich, script, HOROVOD_CPU_OPERATIONS="mpi"))
    assert status == 0, output
    assert (transports(output), finalized(output)) == (["MPI"] * 2, 2), output


def test_program_that_initialises_mpi_without_mpi4py(one_of_two):
    script = """
import atexit
import os
import sys
number = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["HOROVOD_HOSTNAME"] = "host" + number
atexit.register(lambda: sys.stdout.write(f"finalized {sys.modules['mpi4py.MPI'].Is_finalized()}\\n"))
"""
    check = "import mpi4py; assert mpi4py.rc.initialize is True\n"
    status, output = finish(
        mpirun(one_of_two, script + TRANSPORT + check, HOROVOD_CPU_OPERATIONS="mpi")
    )
    assert status == 0, output
    assert len(re.findall("over MPI, True True False", output)) == 2, output
    assert finalized(output) == 2, output


# ---- MPI that the program has initialised ----------------------------------------------------------------------------


def test_thread_level_serialized_set_by_the_program(one_of_two):
    script = level("serialized") + on_hosts(TRANSPORT)
    script += (
        "assert hvd.common.context.context.connections().mpi.description()['worker'] is not None"
    )
    status, output = finish(mpirun(one_of_two, script, HOROVOD_CPU_OPERATIONS="mpi"))
    assert status == 0, output
    assert len(re.findall("over MPI, True False False", output)) == 2, output
    assert output.count("W horoplug] [0]: MPI thread level 'serialized': calls go through one") == 1
    assert output.count("must not call MPI itself") == 1, output


@pytest.mark.parametrize("name", ["single", "funneled", "serialized"])
def test_low_thread_level_falls_back_to_tcp_with_advice(mpich, name):
    """At level serialized, the program may call MPI at any time; below, only the program's main thread may call it."""
    status, output = finish(mpirun(mpich, level(name) + on_hosts(TRANSPORT)))
    assert status == 0, output
    assert transports(output) == ["TCP", "TCP"], output
    [line] = re.findall(f"W horoplug.*thread level is '{name}'.*", output)  # rank 0's warning
    advice = (
        "HOROVOD_CPU_OPERATIONS=mpi" if name == "serialized" else "mpi4py.rc.initialize = False"
    )
    assert advice in line, output


@pytest.mark.parametrize("name", ["single", "funneled"])
def test_too_low_thread_level_is_refused(mpich, name):
    script = level(name) + on_hosts(TRANSPORT)
    status, output = finish(mpirun(mpich, script, HOROVOD_CPU_OPERATIONS="mpi"))
    assert status == 0, output
    refusal = f"refused: ValueError: HOROVOD_CPU_OPERATIONS=mpi.*'{name}'.*rc.initialize = False"
    assert len(re.findall(refusal, output)) == 2, output


# ---- ranks that die or stop ------------------------------------------------------------------------------------------


def start(place, folder, algorithm, seconds, options=(), way="mpi"):
    """Start three ranks, of which rank 1 will be killed or stopped."""
    return mpirun(
        place,
        level("funneled") + LEFT_TO_HOROPLUG + ENDING,
        str(folder),
        "ends",
        "allreduce",
        np=3,
        options=options,
        HOROVOD_CPU_OPERATIONS=way,
        HOROPLUG_ALGORITHM=algorithm,
        HOROVOD_GLOO_TIMEOUT_SECONDS=seconds,
    )


@pytest.mark.parametrize(("mpi", "algorithm"), [("openmpi", "pairwise"), ("mpich", "mpi")])
def test_rank_that_dies_is_named(mpi, tmp_path, algorithm):
    """All other ranks get an error that names it. (MPICH's mpirun may end them before they print it.)"""
    kept = mpi == "openmpi"
    options = ["--continuous" if kept else "-disable-auto-cleanup"]
    job = start(find(mpi), tmp_path, algorithm, "20", options)
    kill(job, tmp_path, signal.SIGKILL)
    status, output = finish(job)
    assert kept or status != 0, output
    assert len(failures(output)) == 2 or not kept, output
    assert all("rank 1 has died" in text for text in failures(output)), output


@pytest.mark.parametrize("way", ["mpi", "gloo"])
def test_stopped_rank_is_named(mpich, tmp_path, way):
    """The others fail, and the time limit for MPI_Finalize, on its own thread, holds whichever transport carried the
    data, if the ranks found each other over MPI."""
    job = start(mpich, tmp_path, "pairwise", "2", way=way)
    pid = kill(job, tmp_path, signal.SIGSTOP)
    try:
        _, output = finish(job)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert "MPI_Finalize has not returned for 2 s" in output, output
    assert len(failures(output)) == 2, output
    assert all(re.search(r"no progress for 2 s, waiting for rank", t) for t in failures(output))
