"""horovodrun in a Slurm job with two nodes, whose other node it reaches by srun. Real Slurm daemons run both nodes."""

import contextlib
import json
import os
import re
import signal
import sys

import psutil
import pytest

from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.slurm_daemons import HOST, OTHER, allocated, slurm, without_ssh
from tests.harness.starters import JOB
from tests.harness.support import until

__all__ = ["allocated", "slurm", "without_ssh"]  # fixtures

HOROVODRUN = (sys.executable, "-m", "horoplug.runner")

# Runs horovodrun, waits for a number of lines with "ready", does something, and reports the result and what is left.
DRIVER = program_text("tests/launcher/programs/slurm_step_driver.py")
# sleep replaces the rank's shell, which would print "Killed" if Slurm killed its child first.
READY = "sleep 600 & (setsid sleep 600 &) ; echo ready $SLURMD_NODENAME; exec sleep 600"


@pytest.fixture
def driven(allocated):
    """A function that runs horovodrun with ranks that start daemons, does something when they are ready, and returns
    exit code, stdout and stderr. Checks that no process is left."""

    def run(action, *flags, ranks=READY, count=4, **variables):
        command = (*HOROVODRUN, *flags, "sh", "-c", ranks)
        driver = (sys.executable, "-c", DRIVER, count, action)
        _, output = allocated(*driver, *command, **variables)
        found = re.search("RESULT (.*)", output)
        assert found, output
        code, out, err, left = json.loads(found[1])
        assert left == [], output
        return code, out, err

    return run


@pytest.mark.short
def test_job_on_two_nodes(allocated, without_ssh):
    env, log = without_ssh
    status, output = allocated(*HOROVODRUN, sys.executable, "-c", JOB, **env)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d of \d) is done", output)) == [f"{r} of 4" for r in range(4)]
    assert not log.exists()


def test_nodes_and_environment_of_ranks(allocated, tmp_path):
    show = (
        "import os; names = 'SLURMD_NODENAME', 'HOROVOD_HOSTNAME', 'TOKEN', 'OTHER', 'OMP_NUM_THREADS', 'HOME'\n"
        "rank = os.environ['HOROVOD_RANK']\n"
        "print('SHOWN', rank, os.getcwd(), [os.environ.get(name) for name in names[1:]],"
        " os.environ.get('SLURMD_NODENAME') if rank > '1' else '')"
    )
    env = {"TOKEN": "hf_" + "x" * 20, "OTHER": "1", "OMP_NUM_THREADS": "3"}
    status, output = allocated(*HOROVODRUN, "-x", "TOKEN", sys.executable, "-c", show, **env)
    assert status == 0, output
    shown = dict(re.findall(r"SHOWN (\d) (.*)", output))
    home = os.environ["HOME"]
    for rank in "01":
        assert f"{[HOST, env['TOKEN'], '1', '3', home]}" in shown[rank]
    for rank in "23":
        assert f"{[OTHER, env['TOKEN'], None, '3', home]} {OTHER}" in shown[rank]


def test_secret_is_neither_on_a_command_line_nor_in_the_environment_of_srun(driven):
    check = """
secret = re.search("SECRET (.*)", "".join(lines))[1]
import base64
for text in (secret, base64.b64decode(secret).hex(), os.environ["TOKEN"]):
    for process in psutil.process_iter():
        try:
            assert text not in " ".join(process.cmdline())
        except psutil.Error:
            pass
assert not [name for srun in sruns() for name in srun.environ() if "SECRET" in name]
tasks = named(sys.executable, "horoplug.runner.start.step_task")
assert tasks
for task in tasks:
    assert secret not in task.environ().values()
    assert os.environ["TOKEN"] not in task.environ().values()
run.terminate()
"""
    ranks = 'echo SECRET "$_HOROVOD_SECRET_KEY"; echo ready; exec sleep 600'
    code, _, err = driven(check, "-x", "TOKEN", ranks=ranks, TOKEN="hf_" + "y" * 20)
    assert (code, err) == (143, "horovodrun: terminated; all ranks were ended\n")


def test_failure_on_the_other_node(allocated):
    program = "import os, signal\nif os.environ['HOROVOD_RANK'] == '3': os._exit(7)\nsignal.pause()"
    status, output = allocated(*HOROVODRUN, sys.executable, "-c", program)
    assert (status, output) == (
        7,
        "horovodrun: rank 3 exited with code 7; the other ranks were ended\n",
    )


def test_large_output_of_the_other_node_is_complete(allocated):
    show = "import os\nfor i in range(30000 * (os.environ['HOROVOD_RANK'] == '3')): print(i)"
    status, output = allocated(*HOROVODRUN, sys.executable, "-c", show)
    assert status == 0
    assert output.splitlines() == [f"[3]<stdout>:{i}" for i in range(30000)]


def test_interrupt_ends_all_nodes(driven):
    code, _, err = driven("run.send_signal(signal.SIGINT)")
    assert (code, err) == (130, "horovodrun: interrupted; all ranks were ended\n")


def test_killed_launcher_leaves_nothing(driven):
    code, _, _ = driven("run.kill()")
    assert code == -9


def test_killed_srun_is_one_line(driven):
    code, _, err = driven("sruns()[0].kill()")
    why = "srun was killed by signal 9 (SIGKILL)"
    assert code == 1
    assert (
        err == f"horovodrun: host {OTHER}: the connection was lost: {why}; all ranks were ended\n"
    )


AGENTS = """
(task,) = named(sys.executable, "horoplug.runner.start.step_task")
guard = task.children()[0]
agent = guard.children()[0]
"""


def test_srun_is_named_if_its_ranks_are_killed_first(driven):
    """Slurm kills the processes of a step in any order. The agent may live long enough to report the end of a rank."""
    kill = f"""{AGENTS}
agent.children()[0].kill()
while "was killed by signal 9" not in run.stderr.readline():
    pass
sruns()[0].kill()
"""
    code, _, err = driven(kill, "--verbose")
    why = "srun was killed by signal 9 (SIGKILL)"
    assert code == 1
    assert (
        err.splitlines()[-1]
        == f"horovodrun: host {OTHER}: the connection was lost: {why}; all ranks were ended"
    )


@pytest.mark.short(failure=True)
def test_killed_rank_on_the_other_node(driven):
    code, _, err = driven(f"{AGENTS}\nagent.children()[0].kill()")
    assert code == 128 + signal.SIGKILL
    killed = r"rank [23] was killed by signal 9 \(SIGKILL\); the other ranks were ended"
    assert re.fullmatch(f"horovodrun: {killed}\n", err), err


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("agent", "the agent was killed by signal 9 (SIGKILL)"),
        ("task", "srun's task there has ended"),
    ],
)
def test_killed_agent_is_one_line(driven, which, why):
    code, _, err = driven(f"{AGENTS}\n{which}.kill()")
    assert code == 1
    assert (
        err == f"horovodrun: host {OTHER}: the connection was lost: {why}; all ranks were ended\n"
    )


def test_cancelled_step_ends_the_job(driven):
    cancel = """
shown = subprocess.run(["squeue", "-h", "-s", "-o", "%i", "-j", os.environ["SLURM_JOB_ID"]],
    capture_output=True, text=True, check=True).stdout.split()
(step,) = [each for each in shown if each.partition(".")[2].isdecimal()]
subprocess.run(["scancel", step], check=True)
"""
    code, _, err = driven(cancel)
    assert code == 1
    cancelled = r"slurmstepd\S*: error: \*\*\* STEP \S+ ON zz-other CANCELLED AT \S+ \*\*\*"
    lost = f"host {OTHER}: the connection was lost: ({cancelled}|srun was killed by signal 9 .*)"
    assert re.fullmatch(f"horovodrun: {lost}; all ranks were ended\n", err), err


def test_cancelled_job_leaves_nothing(slurm, tmp_path):
    script, output = tmp_path / "script.sh", tmp_path / "output"
    script.write_text(f"#!/bin/bash\n{sys.executable} -m horoplug.runner sh -c '{READY}'\n")
    flags = ("-N", "2", "-n", "4", "--ntasks-per-node=2", "--parsable", "-o", str(output))
    status, job = slurm("sbatch", *flags, str(script))
    assert status == 0, job
    job = job.strip()
    try:
        until(lambda: output.exists() and output.read_text().count("ready") == 4, 40)
    finally:
        slurm("scancel", job)
    until(lambda: not processes_of(job), 30)


def processes_of(job):
    """The processes of a Slurm job."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job:
                found.append(process)
    return found


def test_flags_for_ssh_ask_for_ssh(allocated, without_ssh):
    env, log = without_ssh
    for number, flags in enumerate((["--ssh", "ssh"], ["-p", 22], ["-i", "key"], ["--ssh-strict"])):
        status, output = allocated(*HOROVODRUN, *flags, "true", **env)
        assert (status, output) == (1, f"horovodrun: host {OTHER}: ssh: there is no ssh\n")
        assert len(log.read_text().splitlines()) == number + 1


def test_without_srun_ssh_is_used(allocated, without_ssh):
    env, _ = without_ssh
    program = (
        "import os, sys; os.environ['PATH'] = sys.argv[1]; os.execv(sys.executable, sys.argv[2:])"
    )
    folder = env["PATH"].split(":")[0]
    status, output = allocated(
        *(sys.executable, "-c", program, f"{folder}:/bin-without-srun", *HOROVODRUN),
        *(sys.executable, "-c", "pass"),
        **env,
    )
    assert (status, output) == (1, f"horovodrun: host {OTHER}: ssh: there is no ssh\n")


def test_unusable_python_on_the_other_node(allocated):
    status, output = allocated(*HOROVODRUN, "--remote-python", "/nonesuch/python", "true")
    assert status == 1
    assert re.fullmatch(rf"horovodrun: host {OTHER}: [^\n]*/nonesuch/python[^\n]*\n", output), (
        output
    )


def test_node_without_horoplug(allocated, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH; cd /; exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    status, output = allocated(*HOROVODRUN, "--remote-python", bare, "true")
    assert status == 1
    text = f"horovodrun: host {OTHER}: horoplug is not installed for the Python there, or is older "
    assert output.startswith(text), output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "hangs"])
def test_srun_that_cannot_start_tasks(allocated, tmp_path, fails):
    says = "echo 'srun: error: Unable to create step for job 1: Invalid job id' >&2; exit 1"
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{says if fails else 'exec sleep 600'}\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # The launcher does not wait for an srun that has started no task.
    program = "import sys\nfrom horoplug.runner import job, launch\njob._CLOSE_SECONDS = 600.0\nsys.exit(launch.main())"
    limit = round(scaled(5))  # in which the other host answers
    command = (sys.executable, "-c", program, "--start-timeout", limit, "true")
    status, output = allocated(*command, **env)
    why = (
        f"host {OTHER}: srun: error: Unable to create step for job 1: Invalid job id "
        "(--ssh ssh starts the agents by ssh)"
    )
    why = why if fails else f"no answer from {OTHER} within {limit} s"
    assert (status, output) == (1, f"horovodrun: {why}\n")
