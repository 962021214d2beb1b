"""Jobs under real Slurm daemons, where Slurm is installed (harness/slurm_daemons.py)."""

import re
import sys

import pytest

from tests.harness import ROOT, program_text
from tests.harness.mpi_jobs import find, no_files_of_mpi, on_hosts, place
from tests.harness.same_program import RANKS, assert_same_as_horovodrun
from tests.harness.slurm_daemons import HOST, batch, slurm
from tests.harness.starters import JOB
from tests.harness.support import until
from tests.harness.user_errors import ENVIRONMENT, REPORT, check_reports

__all__ = ["no_files_of_mpi", "place", "slurm"]  # fixtures


def done(output):
    return sorted(re.findall(r"rank (\d of \d) is done", output))


@pytest.mark.short
def test_job_under_srun(slurm):
    status, output = slurm("srun", "-n", "2", sys.executable, "-c", JOB)
    assert status == 0, output
    assert done(output) == ["0 of 2", "1 of 2"]


@pytest.mark.short
def test_job_under_srun_on_two_nodes(slurm):
    status, output = slurm("srun", "-N", "2", "-n", "4", sys.executable, "-c", JOB)
    assert status == 0, output
    assert done(output) == [f"{rank} of 4" for rank in range(4)]


def test_mistakes_are_one_line(slurm):
    status, output = slurm(
        "srun", "-N", "2", "-n", "2", sys.executable, "-c", REPORT, **ENVIRONMENT
    )
    assert status == 0, output
    check_reports("numpy", output, 2)


def test_benchmark_under_srun(slurm):
    command = ("srun", "-N", "2", "-n", "4", sys.executable, ROOT / "benchmarks/allreduce.py")
    status, output = slurm(*command, "-b", "8", "-e", "4K", "-f", "16", "-n", "5")
    assert status == 0, output
    assert "# wrong results: 0" in output


def test_training_under_srun_gives_the_parameters_of_horovodrun(slurm, tmp_path):
    def train(script, arguments):
        status, output = slurm("srun", "-n", str(RANKS), sys.executable, script, *arguments)
        assert status == 0, output

    assert_same_as_horovodrun(tmp_path, train)


def test_batch_script_with_srun(slurm, tmp_path):
    """The script itself is not a rank and can start several jobs, in succession and in parallel."""
    job, script = tmp_path / "job.py", tmp_path / "script.sh"
    job.write_text(JOB)
    python = f"{sys.executable} {job}"
    script.write_text(f"""#!/bin/bash
set -e
{python}
srun {python}
srun -n 1 --exact {python} & srun -n 2 --exact {python} & wait %1; wait %2
{sys.executable} -m horoplug.runner {python}
""")
    expected = ["0 of 1"] * 2 + ["0 of 2", "1 of 2"] + 2 * ["0 of 3", "1 of 3", "2 of 3"]
    assert done(batch(slurm, script, "-w", HOST, "-n", "3")) == sorted(expected)


# The shell of `srun --pty`, as a user types into it.
AT_A_TERMINAL = program_text("tests/launcher/programs/slurm_at_a_terminal.py")


def test_program_in_an_interactive_shell_is_not_a_rank(slurm, tmp_path):
    """Although the shell is a task of srun and has all its variables."""
    (tmp_path / "job.py").write_text(JOB)
    status, output = slurm(sys.executable, "-c", AT_A_TERMINAL, tmp_path / "job.py")
    assert status == 0, output
    assert done(output) == ["0 of 1"], output
    assert "an interactive shell (srun --pty) has started this process" in " ".join(output.split())


def test_variables_of_a_job_that_is_over(slurm, tmp_path):
    """A shell in tmux keeps them. horovodrun does not use hosts that belong to other users' jobs by then."""
    status, output = slurm("srun", "-n", "1", "sh", "-c", "echo $SLURM_JOB_ID")
    assert status == 0, output
    variables = {"SLURM_JOB_ID": output.strip(), "SLURM_JOB_NODELIST": "zz-other"}
    horovodrun = (sys.executable, "-m", "horoplug.runner")

    show = ("squeue", "-h", "--states=all", f"--jobs={output.strip()}", "--format=%T")
    until(lambda: slurm(*show)[1] == "COMPLETED\n", timeout=30)  # a moment after srun's end
    status, output = slurm(*horovodrun, "true", **variables)
    assert (status, len(output.splitlines())) == (2, 2)
    assert "how many processes?" in output
    status, output = slurm(*horovodrun, "-np", "2", sys.executable, "-c", JOB, **variables)
    assert status == 0, output
    assert done(output) == ["0 of 2", "1 of 2"]
    assert f"Slurm's job {variables['SLURM_JOB_ID']} is over (COMPLETED), so its hosts" in output


COMMUNICATOR = program_text("tests/launcher/programs/slurm_communicator.py")


@pytest.mark.parametrize(("name", "how"), [("mpich", "pmi2"), ("openmpi", "pmix")])
def test_job_under_srun_with_mpi(slurm, name, how):
    """With an MPI that Slurm has initialised, init() accepts communicators, and MPI can carry the data."""
    pytest.importorskip("mpi4py")
    found = find(name)
    command = ("srun", f"--mpi={how}", "-n", "2", sys.executable, "-c")
    variables = {**found.environment(), "HOROVOD_CPU_OPERATIONS": "mpi"}
    status, output = slurm(*command, on_hosts(COMMUNICATOR), **variables)
    if "can not load PMIx library" in output:
        pytest.skip("Slurm looks for a PMIx that is not there: apt-get install libpmix-dev")
    assert status == 0, output
    assert done(output) == ["0 of 2", "1 of 2"]
    # Without it, MPI starts every process as a separate job.
    status, output = slurm("srun", *command[2:], COMMUNICATOR, **found.environment())
    assert status != 0
    assert "MPI knows of 1 of the 2 processes that Slurm's srun has started" in output


def test_mpirun_in_a_batch_script(slurm, tmp_path, place):
    pytest.importorskip("mpi4py")
    job, script = tmp_path / "job.py", tmp_path / "script.sh"
    job.write_text(JOB)
    script.write_text(f"#!/bin/bash\n{place.mpirun} -np 2 {sys.executable} {job}\n")
    output = batch(slurm, script, "-w", HOST, "-n", "2", **place.environment())
    assert done(output) == ["0 of 2", "1 of 2"]
