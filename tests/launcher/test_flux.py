"""horovodrun in an instance of Flux, with a program in place of flux that runs the tasks on this machine."""

import json
import os
import subprocess
import sys

import pytest

from horoplug.runner.hosts.hosts import Host
from horoplug.runner.start.allocation import allocation
from horoplug.runner.start.flux import Flux
from tests.harness.limits import scaled
from tests.harness.support import environment
from tests.harness.user_errors import ENVIRONMENT, REPORT, check_reports

# "flux resource R" prints the resources; "flux exec" runs the command for each rank, under the name of its host.
FLUX = """
import json, os, subprocess, sys
RESOURCES, LOG, FOLDER = {resources!r}, {log!r}, {folder!r}
verb, *words = sys.argv[1:]
if verb == "resource":
    assert words == ["R"]
    print(RESOURCES)
    sys.exit({code})
assert verb == "exec"
flags = [word for word in words if word.startswith("--")][:2]
command = words[len(flags):]
with open(LOG, "a") as file:
    file.write(" ".join(flags) + "\\n")
told = sys.stdin.buffer.read()
ranks = flags[0].partition("=")[2].split(",")
tasks = []
for rank in ranks:
    path = f"{{FOLDER}}:{{os.environ['PYTHONPATH']}}"
    env = os.environ | {{"IMITATED_HOST": f"n{{int(rank) + 1}}", "PYTHONPATH": path}}
    tasks.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=env))
    tasks[-1].stdin.write(told)
    tasks[-1].stdin.close()
codes = [task.wait() for task in tasks]
for rank, code in zip(ranks, codes):
    if code:
        print(f"[{{rank}}]: Exit {{code}}", file=sys.stderr)
sys.exit(max(codes))
"""
HOST_NAME = """
import os, socket
if "IMITATED_HOST" in os.environ:
    socket.gethostname = lambda: os.environ["IMITATED_HOST"]
"""


def resources(children, nodes="n[1-3]", rank="0-2"):
    lite = [{"rank": rank, "children": children}]
    return json.dumps({"version": 1, "execution": {"R_lite": lite, "nodelist": [nodes]}})


@pytest.fixture
def flux(tmp_path):
    """A function that makes the program. Returns the variables of a process in the instance."""

    def make(printed, code=0):
        (tmp_path / "sitecustomize.py").write_text(HOST_NAME)
        program = tmp_path / "flux.py"
        log = str(tmp_path / "log")
        program.write_text(FLUX.format(resources=printed, log=log, folder=str(tmp_path), code=code))
        script = tmp_path / "flux"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        script.chmod(0o755)
        env = environment()
        return env | {"FLUX_URI": "local:///f", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


def run(env, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "horoplug.runner", *map(str, arguments)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )


@pytest.mark.short
def test_one_step_starts_the_agents_of_all_hosts(flux, tmp_path):
    done = run(flux(resources({"core": "0"})), "sh", "-c", "echo on $HOROVOD_HOSTNAME")
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"[{rank}]<stdout>:on n{rank + 1}" for rank in range(3)]
    assert (tmp_path / "log").read_text() == "--rank=0,1,2 --dir=/\n"


def test_hosts_without_ranks_get_no_task_and_a_failed_rank_is_named(flux, tmp_path):
    command = [
        "sh",
        "-c",
        "[ $HOROVOD_RANK = 0 ] && exec sleep 600; exit 3",
    ]  # rank 0 runs until it is ended
    done = run(flux(resources({"core": "0"})), "-np", 2, *command)
    assert done.returncode == 3
    assert done.stderr == "horovodrun: rank 1 exited with code 3; the other ranks were ended\n"
    assert (tmp_path / "log").read_text() == "--rank=0,1 --dir=/\n"


def test_mistakes_are_one_line(flux):
    env = flux(resources({"core": "0"})) | ENVIRONMENT
    done = run(env, "-np", 2, sys.executable, "-c", REPORT)
    assert done.returncode == 0, done.stderr
    check_reports("numpy", done.stdout, 2)


def test_processes_of_an_elastic_job_have_a_step_for_each_host(flux, tmp_path):
    done = run(flux(resources({"core": "0"})), "--min-np", 3, "true")
    assert (done.returncode, done.stderr) == (0, "")
    steps = sorted((tmp_path / "log").read_text().splitlines())
    assert steps == [f"--rank={rank} --dir=/" for rank in range(3)]


@pytest.mark.parametrize(
    ("children", "slots"), [({"core": "0-3,6"}, 5), ({"core": "0-7", "gpu": "0-1"}, 2)]
)
def test_slots_are_gpus_or_cores(flux, monkeypatch, children, slots):
    env = flux(resources(children, "a,b1", "0-1"))
    monkeypatch.setenv("PATH", env["PATH"])
    assert allocation({"FLUX_URI": "local:///f"}) == [Host("a", slots), Host("b1", slots)]


@pytest.mark.parametrize(
    ("printed", "code", "why"),
    [("{}", 0, "flux resource R has printed no resources"), ("", 1, "flux resource R:")],
)
def test_an_instance_that_does_not_answer_is_one_line(flux, printed, code, why):
    done = run(flux(printed, code), "true")
    assert done.returncode == 2
    assert done.stderr.startswith(f"horovodrun: Flux has set FLUX_URI=local:///f, but: {why}")
    assert done.stderr.count("\n") == 1


def test_a_host_that_has_left_the_instance_is_named(flux, monkeypatch):
    monkeypatch.setenv("PATH", flux(resources({"core": "0"}))["PATH"])
    with pytest.raises(OSError, match="'n4' is not in list"):
        Flux("flux", "/opt/python").command(["n4"], "module")


def test_command_of_flux(flux, monkeypatch):
    monkeypatch.setenv("PATH", flux(resources({"core": "0"}))["PATH"])
    command = Flux("flux", "/opt/python").command(["n3", "n1"], "module")
    assert command == [
        *("flux", "exec", "--rank=2,0", "--dir=/", "/opt/python", "-X", "utf8", "-m", "module"),
    ]
