"""How horovodrun connects to hosts, with a program in place of ssh that runs the agent on this machine."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.harness.limits import scaled
from tests.harness.support import environment, until

LIMITED = """
import sys
from horoplug.runner import launch; from horoplug.runner.start import agents, spawn_tree
agents.CONNECTING = int(sys.argv.pop(1))
spawn_tree.MOST_DIRECT = 6
spawn_tree.FAN_OUT = 3
sys.exit(launch.main())
"""
# Notes its start, and then runs the last argument, as sshd would on the host.
SSH = """#!/bin/sh
echo started >> {log}
for command; do :; done
export command
exec {run}
"""
# For SSH: fails if an agent has started it, connects to the first three hosts, and waits for the others.
ONLY_THE_FIRST = """sh -c '
if grep -q "f=open(0" /proc/$PPID/cmdline; then echo refused >> {log}; exit 255; fi
case "$*" in *h[0-2].invalid*) eval "$command"; exit;; esac
echo waiting >> {log}; exec sleep 600' - "$@"
"""


@pytest.fixture
def horovodrun(tmp_path):
    """A function that starts horovodrun, with a limit of concurrent connections."""
    log = tmp_path / "log"
    log.touch()

    def start(limit, *arguments, run='sh -c "$command"'):
        ssh = tmp_path / "ssh"
        ssh.write_text(SSH.format(log=log, run=run.format(log=log)))
        ssh.chmod(0o755)
        return subprocess.Popen(
            [sys.executable, "-c", LIMITED, str(limit), *map(str, arguments)],
            env=environment() | {"HOROPLUG_SSH": str(ssh)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    start.count = lambda text="started": log.read_text().splitlines().count(text)
    return start


def hosts(count):
    return ",".join(f"h{i}.invalid" for i in range(count))


def test_hosts_are_connected_to_a_few_at_a_time(horovodrun):
    with horovodrun(2, "-np", 3, "-H", hosts(3), "echo", "hello") as run:
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:hello" for rank in range(3)]
    assert horovodrun.count() == 3


def test_no_more_hosts_are_connected_to_while_others_do_not_answer(horovodrun):
    arguments = ("--start-timeout", 600, "-np", 5, "-H", hosts(5), "true")
    with horovodrun(2, *arguments, run="sleep 600") as run:
        until(lambda: horovodrun.count() >= 2, 40)
        run.terminate()
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, out) == (143, "")
    assert err == "horovodrun: terminated; all ranks were ended\n"
    assert horovodrun.count() == 2


def test_launcher_connects_to_a_few_hosts_at_a_time_in_place_of_agents(horovodrun):
    """Agents cannot start those of hosts 3 to 7, and these hosts do not answer the launcher."""
    arguments = ("--start-timeout", 600, "-np", 8, "-H", hosts(8), "true")
    with horovodrun(2, *arguments, run=ONLY_THE_FIRST) as run:
        until(lambda: horovodrun.count("waiting") >= 2, 40)
        run.terminate()
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, out) == (143, "")
    assert err == "horovodrun: terminated; all ranks were ended\n"
    assert horovodrun.count("waiting") == 2
    assert horovodrun.count("refused") >= 2


def test_lost_agent_is_one_line(horovodrun):
    show = "import os, signal; print(os.getppid(), flush=True); signal.pause()"
    with horovodrun(2, "-np", 2, "-H", hosts(2), sys.executable, "-c", show) as run:
        pids = {}
        for _ in range(2):
            rank, pid = re.fullmatch(r"\[(\d)\]<stdout>:(\d+)\n", run.stdout.readline()).groups()
            pids[rank] = int(pid)
        os.kill(pids["1"], signal.SIGKILL)
        out, err = run.communicate(timeout=scaled(60))
    assert (run.returncode, out) == (1, "")
    lost = "host h1.invalid: the connection was lost: the agent was killed by signal 9 (SIGKILL)"
    assert err == f"horovodrun: {lost}; all ranks were ended\n"
