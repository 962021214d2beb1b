"""Jobs that mpirun starts, under every MPI that is installed in build/mpi."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.mpi_jobs import (
    find,
    finish,
    mpirun,
    no_files_of_mpi,
    on_hosts,
    place,
    remove_unused,
)
from tests.harness.support import environment, until
from tests.harness.user_errors import ENVIRONMENT, REPORT, check_reports

__all__ = ["no_files_of_mpi", "place"]  # fixtures

JOB = program_text("tests/mpi/programs/mpirun.py")


@pytest.mark.short
def test_job_under_mpirun(place):
    pytest.importorskip("mpi4py")
    status, output = finish(mpirun(place, JOB, np=4))
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) of 4 is done", output)) == ["0", "1", "2", "3"]


def test_job_on_hosts_without_shared_memory(place):
    """Ranks find rank 0 by its network address."""
    pytest.importorskip("mpi4py")
    script = """
import numpy as np
import horoplug as hvd
hvd.init()
assert (hvd.local_size(), hvd.cross_size()) == (2, 2)
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [4] * 1000
print("done", flush=True)
"""
    status, output = finish(mpirun(place, on_hosts(script), np=4))
    assert status == 0, output
    assert output.count("done") == 4


def test_mistakes_are_one_line(place):
    pytest.importorskip("mpi4py")
    status, output = finish(mpirun(place, REPORT, **ENVIRONMENT))
    assert status == 0, output
    check_reports("numpy", output, 2)


# Prints whether the job's secret has gone over MPI.
SECRET = program_text("tests/mpi/programs/mpirun_secret.py")


@pytest.mark.parametrize(
    ("case", "expected"),
    [("file", "not sent"), ("home", "not sent"), ("none", "sent"), ("one host", "sent")],
)
def test_secret_crosses_the_network_only_without_a_common_key(place, tmp_path, case, expected):
    """With a key in a file that all hosts have, it is derived; without one, MPI carries it."""
    pytest.importorskip("mpi4py")
    variables = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    if case == "file":
        file = tmp_path / "key"
        file.touch(0o600)
        file.write_text(os.urandom(32).hex())
        variables["HOROPLUG_SECRET_FILE"] = str(file)
    script = SECRET if case == "one host" else on_hosts(SECRET)
    status, output = finish(mpirun(place, script, str(tmp_path), case, **variables))
    assert status == 0, output
    assert re.findall(r"^(?:not )?sent$", output, re.MULTILINE) == [expected] * 2, output
    assert output.count("done") == 2
    assert (tmp_path / "config").exists() == (case in ("home", "none"))


def test_different_keys_under_mpirun_are_an_error(place, tmp_path):
    pytest.importorskip("mpi4py")
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    status, output = finish(mpirun(place, on_hosts(SECRET), str(tmp_path), "other", **variables))
    assert status == 0, output
    assert (
        output.count("refused: the secret that the environment gives is not the same on all") == 2
    )
    assert "ranks [1] have another one than rank 0" in output


FAILING = program_text("tests/mpi/programs/mpirun_failing.py")


def test_rank_that_exits_early_is_named(place):
    """The other ranks get an error that names it, and MPI_Finalize does not hang."""
    pytest.importorskip("mpi4py")
    status, output = finish(mpirun(place, FAILING))
    assert status == 0, output
    assert re.search(r"failed: .*after.*rank 1", output), output


@pytest.mark.short("openmpi*", failure=True)
def test_killed_rank_is_named(place, tmp_path):
    pytest.importorskip("mpi4py")
    script = """
import os, sys
from pathlib import Path
import numpy as np
import horoplug as hvd
hvd.init()
if hvd.rank() == 1:
    part = Path(sys.argv[1], "part")
    part.write_text(str(os.getpid()))
    part.rename(Path(sys.argv[1], "pid"))
while True:
    hvd.allreduce(np.ones(1), name="step")
"""
    process = mpirun(place, script, str(tmp_path))
    pid = Path(tmp_path, "pid")
    until(lambda: pid.exists() or process.poll() is not None, timeout=40)
    assert process.poll() is None, process.communicate()[0]
    os.kill(int(pid.read_text()), signal.SIGKILL)
    status, output = finish(process)
    assert status != 0, output


REFUSED = """
import sys
if sys.argv[1:] == ["no mpi4py"]:
    sys.modules["mpi4py"] = None
import horoplug as hvd
try:
    hvd.init()
except ValueError as error:
    # With one write: all processes share this output.
    sys.stdout.write(f"refused: {error}\\n")
"""


def refusals(output: str) -> list[str]:
    return re.findall(r"refused: (.*)", output)


@pytest.mark.short(failure=True)
def test_missing_mpi4py_is_an_error(place):
    _, output = finish(mpirun(place, REFUSED, "no mpi4py"))
    assert len(refusals(output)) == 2, output
    assert all("pip install mpi4py" in text for text in refusals(output))


def test_missing_mpi_library_is_an_error(place):
    pytest.importorskip("mpi4py")
    variables = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": ""}
    _, output = finish(mpirun(place, REFUSED, **variables))
    assert len(refusals(output)) == 2, output
    assert all("MPI4PY_LIBMPI" in text for text in refusals(output))


def test_mpirun_of_another_mpi_is_an_error():
    """Under another MPI's mpirun, Open MPI's library starts jobs of one process each, which must be an error."""
    pytest.importorskip("mpi4py")
    theirs, ours = find("mpich"), find("openmpi")
    variables = ours.environment() | {"PATH": theirs.environment()["PATH"]}
    _, output = finish(mpirun(theirs, REFUSED, **variables))
    assert len(refusals(output)) == 2, output
    assert all("the mpirun that belongs to it" in text for text in refusals(output))


TWO = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1], os.RTLD_LOCAL | os.RTLD_NOW)
""" + REFUSED.replace('if sys.argv[1:] == ["no mpi4py"]:', "if False:")


def test_two_mpi_libraries_in_one_process_are_an_error():
    """The program has opened the library of another MPI than that of mpirun and mpi4py."""
    pytest.importorskip("mpi4py")
    ours, theirs = find("openmpi"), find("mpich")
    _, output = finish(mpirun(ours, TWO, str(theirs.library)))
    assert len(refusals(output)) == 2, output
    for text in refusals(output):
        assert "two MPI libraries" in text
        assert f"{ours.library.resolve()}" in text
        assert f"{theirs.library.resolve()}" in text


FILES = """
import _ctypes, ctypes, shutil, sys
from horoplug.mpi import libraries
for name in sys.argv[2:]:
    path = f"{sys.argv[1]}/{name}"
    shutil.copy(_ctypes.__file__, path)
    ctypes.CDLL(path)
assert len(libraries.loaded_libraries()) == len(sys.argv) - 2
libraries.check_single_library()
"""


def test_cleanup_keeps_the_files_of_a_running_job():
    """Tests that run at the same time share /dev/shm."""
    hold = """
import mmap, os, sys
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
print("mapped", flush=True)
input()
"""
    used, unused = (Path(f"/dev/shm/sm_segment.test.{os.getpid()}.{i}") for i in range(2))
    for path in used, unused:
        path.write_bytes(bytes(4096))
    command = [sys.executable, "-c", hold, used]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"mapped\n"
        remove_unused({used, unused})
        assert (used.exists(), unused.exists()) == (True, False)
        job.communicate(b"\n", timeout=scaled(20))
    remove_unused({used})
    assert not used.exists()


@pytest.mark.parametrize(
    ("names", "are_two"),
    [
        (["libmpi.so.40.30.4", "libmpich.so.12.2.0"], True),  # Debian's names, in one folder
        (["libmpich.so.12.2.0"], False),
        (["libmpi.so.12.0.0", "libmpi_ilp64.so.4.1"], False),
    ],
)
def test_loaded_libraries_of_one_and_two_mpis(tmp_path, names, are_two):
    command = [sys.executable, "-c", FILES, tmp_path, *names]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=scaled(60)
    )
    assert ("two MPI libraries are loaded" in done.stderr) == are_two, done.stderr
    assert (done.returncode == 0) != are_two, done.stderr


def test_communicators_without_mpi_are_refused():
    import horoplug as hvd

    class Communicator:
        def Get_group(self):
            raise AssertionError("not to be asked")

    with pytest.raises(ValueError, match="mpirun"):
        hvd.init(comm=Communicator())
    with pytest.raises(ValueError, match="list of ranks or a communicator"):
        hvd.init(comm=object())
