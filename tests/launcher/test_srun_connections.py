"""How horovodrun starts agents by srun, with a program in place of srun that runs the tasks on this machine."""

import os
import signal
import subprocess
import sys

import pytest

from horoplug.runner.start.srun import Srun
from horoplug.runner.start.step import why_ended
from horoplug.runner.terms import COMMAND_LINE
from tests.harness.limits import scaled
from tests.harness.support import environment, until

SRUN = """
import contextlib, os, subprocess, sys, time
words = sys.argv[1:]
at = next(number for number, word in enumerate(words) if not word.startswith("--"))
flags, command = dict(word.partition("=")[::2] for word in words[:at]), words[at:]
nodes = flags["--nodelist"].split(",")
with open({log!r}, "a") as file:
    file.write(" ".join(nodes) + "\\n")
told = sys.stdin.buffer.read()
exported = {{name: os.environ[name] for name in flags["--export"].split(",")}}
tasks = []
for node in nodes:
    task = {instead!r} if node == "n3" and {instead!r} else command
    env = exported | {{"SLURMD_NODENAME": node}}
    tasks.append(subprocess.Popen(task, stdin=subprocess.PIPE, env=env))
    with contextlib.suppress(BrokenPipeError), tasks[-1].stdin as stdin:
        stdin.write(told)
running = dict(zip(nodes, tasks))
while running:
    time.sleep(0.02)
    for node, task in list(running.items()):
        if task.poll() is not None:
            del running[node]
            if task.returncode:
                ended = f"srun: error: {{node}}: task 0: Exited with exit code {{task.returncode}}"
                print(ended, file=sys.stderr, flush=True)
"""


@pytest.fixture
def horovodrun(tmp_path):
    """A function that starts horovodrun in an imitated job of Slurm on four nodes."""
    log = tmp_path / "log"

    def start(*arguments, instead=None, tasks="1(x4)"):
        program = tmp_path / "srun.py"
        program.write_text(SRUN.format(log=str(log), instead=instead))
        srun = tmp_path / "srun"
        srun.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        srun.chmod(0o755)
        slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": tasks}
        return subprocess.Popen(
            [sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
            env=environment() | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    start.calls = lambda: log.read_text().splitlines()
    return start


def start_limit():
    """Seconds in which the agents of the other nodes answer, each of which starts a few processes."""
    return round(scaled(8))


def test_one_srun_starts_all_agents(horovodrun):
    with horovodrun("sh", "-c", "echo on $HOROVOD_HOSTNAME") as run:
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:on n{rank + 1}" for rank in range(4)]
    assert horovodrun.calls() == ["n1 n2 n3 n4"]


def test_nodes_without_ranks_get_no_task(horovodrun):
    with horovodrun("-np", 2, "true") as run:
        assert run.communicate(timeout=scaled(60)) == ("", "")
    assert horovodrun.calls() == ["n1 n2"]


def test_hosts_that_the_user_names_are_reached_by_ssh(horovodrun):
    with horovodrun("--ssh", "false", "-np", 1, "-H", "n1", "true") as run:
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, out) == (1, "")
    assert err == "horovodrun: host n1: ssh exited with code 1\n"


def test_node_whose_task_fails_is_named_while_the_others_run(horovodrun):
    instead = ["sh", "-c", "echo 'sh: the disk is full' >&2; exit 3"]
    with horovodrun("true", instead=instead) as run:
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, out) == (1, "")
    assert err == "horovodrun: host n3: sh: the disk is full\n"


def test_node_whose_task_hangs_is_named(horovodrun):
    limit = start_limit()
    with horovodrun("--start-timeout", limit, "true", instead=["sleep", "600"]) as run:
        out, err = run.communicate(timeout=scaled(60))
    text = f"horovodrun: no answer from n3 within {limit} s\n"
    assert (run.returncode, out, err) == (1, "", text)


def test_task_that_does_not_know_the_secret_is_refused(horovodrun, tmp_path):
    """A process that connects in place of a task is not listened to."""
    stranger = tmp_path / "stranger.py"
    stranger.write_text(
        "import json, socket, sys\n"
        "told = json.loads(sys.stdin.readline())\n"
        "sock = socket.create_connection(told['addresses'][0])\n"
        "sock.sendall(b'n3' * 1000)\n"
        "try:\n"
        "    while sock.recv(1000): pass\n"
        "except ConnectionResetError: pass\n"
        f"open({str(tmp_path / 'refused')!r}, 'w').close()\n"
        "import time; time.sleep(600)\n"
    )
    limit = start_limit()
    flags = ["--start-timeout", limit]
    with horovodrun(*flags, "true", instead=[sys.executable, str(stranger)]) as run:
        out, err = run.communicate(timeout=scaled(60))
    text = f"horovodrun: no answer from n3 within {limit} s\n"
    assert (run.returncode, out, err) == (1, "", text)
    assert (tmp_path / "refused").exists()


def test_tasks_end_with_the_launcher(horovodrun):
    show = "import os; print(os.getppid(), flush=True); import time; time.sleep(600)"
    with horovodrun(sys.executable, "-c", show) as run:
        agents = [int(run.stdout.readline().partition(":")[2]) for _ in range(4)]
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=scaled(60))
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in agents), 30)


def test_command_of_srun():
    command = Srun("/usr/bin/srun", "/opt/python").command(
        ["n1", "n2"], "horoplug.runner.start.step_task"
    )
    assert command[0] == "/usr/bin/srun"
    assert {"--overlap", "--nodes=2", "--ntasks=2", "--nodelist=n1,n2"} <= set(command)
    assert command[-5:] == ["/opt/python", "-X", "utf8", "-m", "horoplug.runner.start.step_task"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "srun exited with code 1 (--ssh ssh starts the agents by ssh)"),
        (
            ["srun: error: Unable to create step"],
            "srun: error: Unable to create step (--ssh ssh starts the agents by ssh)",
        ),
        (["no room", "srun: error: n1: task 0: Exited with exit code 1"], "no room"),
        (
            ["python: No module named horoplug.runner.start.step_task", ""],
            "horoplug is not installed for the Python there, or is older "
            "(python: No module named horoplug.runner.start.step_task)",
        ),
    ],
)
def test_reason_of_a_task_that_has_not_connected(said, why):
    assert why_ended(said, 1, "srun", COMMAND_LINE) == why
