"""Jobs whose agents are started through a tree of ssh. Each host is a network namespace with an sshd; the launcher, on
h0, starts at most two agents itself, and so does each agent."""

import contextlib
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.harness.limits import scaled
from tests.harness.netns import cluster_fixture, finish, why_not
from tests.harness.netns import nothing_left as nothing_left
from tests.harness.support import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

cluster = cluster_fixture(8)
ALL = ",".join(f"h{i}" for i in range(8))
# The launcher starts h1 and h2, these start h3 to h6, and h3 starts h7.
BEYOND_H1 = ["h3", "h5"]
LOWERED = """
import sys
from horoplug.runner.job import job; from horoplug.runner import launch; from horoplug.runner.start import spawn_tree
spawn_tree.MOST_DIRECT = spawn_tree.FAN_OUT = 2
job._LATER = 2
sys.exit(launch.main())
"""
SUMS = """
import numpy as np
import horoplug as hvd
hvd.init()
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [hvd.size()] * 1000
print("done")
hvd.shutdown()
"""
READY = ["sh", "-c", "sleep 600 & (setsid sleep 600 &) ; echo ready; sleep 600; true"]


def start(cluster, *arguments, hosts=ALL, env=None):
    size = len(hosts.split(","))
    limit = ["--start-timeout", round(scaled(30))]
    command = [sys.executable, "-c", LOWERED, "-np", size, "-H", hosts, *limit, *arguments]
    return cluster.popen(0, *command, env=env)


def wait_for(process, text, count):
    """Read lines of a launcher's output until ``count`` contain the text."""
    while count:
        line = process.stdout.readline()
        assert line, process.communicate()
        count -= text in line


def processes(cluster, host):
    """The processes on a host: for each its psutil.Process and its command line, name and parent."""
    pids = subprocess.run(
        ["ip", "netns", "pids", cluster.space(host)], capture_output=True, text=True, check=True
    )
    found = []
    for pid in pids.stdout.split():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            facts = process.as_dict(["cmdline", "name", "ppid"])
            if facts["cmdline"]:
                found.append((process, facts))
    return found


def ssh_of(cluster, host):
    """The ssh processes that run on a host, by the host that they connect to."""
    found = {}
    for process, facts in processes(cluster, host):
        line = facts["cmdline"]
        if line[:1] == ["ssh"]:
            found[line[line.index("--") + 1]] = process
    return found


def agents(cluster, host):
    """The guard and the agent on a host."""
    parents = {}
    for process, facts in processes(cluster, host):
        line = facts["cmdline"]
        if facts["name"] != "ssh" and "-I" in line and "f=open(0" in " ".join(line):
            parents[process.pid] = facts["ppid"]
    # A process that the agent has forked has the agent's command line until it executes ssh.
    (agent,) = [pid for pid, up in parents.items() if up in parents and parents[up] not in parents]
    return psutil.Process(parents[agent]), psutil.Process(agent)


def wrapper(cluster, folder, *lines):
    """A program in place of ssh that runs commands before ssh, with the host's name in $here."""
    script = folder / "ssh"
    script.write_text(
        "\n".join(["#!/bin/sh", "here=$(hostname)", *lines, f'exec {cluster.ssh} "$@"'])
    )
    script.chmod(0o755)
    return {"HOROPLUG_SSH": str(script)}


@pytest.mark.short
def test_agents_start_agents(cluster):
    process = start(cluster, *READY)
    wait_for(process, "ready", 8)
    found = {f"h{i}": sorted(ssh_of(cluster, f"h{i}")) for i in range(8)}
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, err) == (130, "horovodrun: interrupted; all ranks were ended\n")
    assert {host: to for host, to in found.items() if to} == {
        "h0": ["h1", "h2"],
        "h1": BEYOND_H1,
        "h2": ["h4", "h6"],
        "h3": ["h7"],
    }


def test_collectives_of_a_job_that_starts_as_a_tree(cluster):
    process = start(cluster, sys.executable, "-c", SUMS)
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:done" for rank in range(8)]


def test_output_of_a_leaf_is_complete(cluster):
    count = 30000
    show = f"import os\nfor i in range({count} * (os.environ['HOROVOD_RANK'] == '7')): print(i)"
    code, out, err = finish(start(cluster, sys.executable, "-c", show))
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"[7]<stdout>:{i}" for i in range(count)]


def test_flags_of_ssh_and_variables_reach_the_leaves(cluster):
    # The keys of all hosts are known, since --ssh-strict refuses others.
    key = (cluster.folder / "host_key.pub").read_text()
    known = cluster.folder / "all_hosts"
    known.write_text("".join(f"h{i} {key}" for i in range(8)))
    env = {
        "HOROPLUG_SSH": f"{cluster.ssh} -o UserKnownHostsFile={known}",
        "TOKEN": "hf_" + "x" * 20,
    }
    flags = ["--ssh-strict", "-p", 22, "-i", cluster.folder / "user_key", "-x", "TOKEN"]
    show = "import os, signal; print(os.environ['TOKEN'], flush=True); signal.pause()"
    process = start(cluster, *flags, sys.executable, "-c", show, env=env)
    wait_for(process, env["TOKEN"], 8)
    (leaf,) = ssh_of(cluster, "h3").values()
    line, variables = leaf.cmdline(), leaf.environ()
    everywhere = [facts for i in range(8) for _, facts in processes(cluster, f"h{i}")]
    shown = [" ".join(facts["cmdline"]) for facts in everywhere]
    process.send_signal(signal.SIGINT)
    finish(process)
    for words in (["-p", "22"], ["-i", str(cluster.folder / "user_key")]):
        at = line.index(words[0])
        assert line[at : at + 2] == words
    assert "StrictHostKeyChecking=yes" in line
    assert len(shown) > 30
    assert not [text for text in shown if env["TOKEN"] in text]
    assert "TOKEN" not in variables
    assert not [name for name in variables if "SECRET" in name]


def test_unreachable_leaf_is_named(cluster):
    for leaf, why in (
        ("nonesuch.invalid", "Could not resolve hostname"),
        ("nobody@h7", r"Permission denied \(publickey\)"),
    ):
        hosts = ALL.replace("h7", leaf)
        code, out, err = finish(start(cluster, "true", hosts=hosts))
        assert (code, out) == (1, "")
        assert re.fullmatch(f"horovodrun: host {leaf}: [^\n]*{why}[^\n]*\n", err), err


def test_launcher_starts_agents_that_agents_cannot_start(cluster, tmp_path):
    """Only the launcher's host has a key."""
    refuse = "[ $here = h0 ] || { echo 'Permission denied (publickey).' >&2; exit 255; }"
    env = wrapper(cluster, tmp_path, refuse)
    process = start(cluster, "--verbose", sys.executable, "-c", SUMS, env=env)
    code, out, err = finish(process)
    assert code == 0, err
    assert out.count("done") == 8
    said = [line for line in err.splitlines() if "cannot start the agent" in line]
    assert len(said) == 1
    assert re.fullmatch(
        r"horovodrun: host h[12] cannot start the agent of host h[3456] "
        r"\(Permission denied \(publickey\)\.\): this host starts such agents itself",
        said[0],
    )
    code, out, err = finish(start(cluster, "echo", "done", env=env))
    assert (code, out.count("done"), err) == (0, 8, "")


def test_program_in_place_of_ssh_that_other_hosts_lack(cluster, tmp_path):
    env = wrapper(cluster, tmp_path)
    lacking = tmp_path / "lacking"
    lacking.symlink_to(env["HOROPLUG_SSH"])
    # All hosts share the file system, so the agents get a name that does not exist.
    program = LOWERED.replace(
        "sys.exit",
        "from horoplug.runner.agent import links\n"
        "start = links.Tunnel.start\n"
        "def start_other(tunnel): tunnel._command[0] += '-gone'; start(tunnel)\n"
        "links.Tunnel.start = start_other\n"
        "sys.exit",
    )
    command = [sys.executable, "-c", program, "-np", 8, "-H", ALL, "echo", "done"]
    code, out, err = finish(cluster.popen(0, *command, env={"HOROPLUG_SSH": str(lacking)}))
    assert (code, out.count("done"), err) == (0, 8, "")


@pytest.mark.parametrize("both", [False, True], ids=["agent", "agent and guard"])
def test_agent_killed_while_it_starts_others(cluster, tmp_path, both):
    began = tmp_path / "began"
    hang = f'case "$here $*" in "h1 "*" -- h3 "*) touch {began}; exec sleep 600;; esac'
    env = wrapper(cluster, tmp_path, hang)
    process = start(cluster, *READY, env=env)
    until(began.exists, 40)
    guard, agent = agents(cluster, "h1")
    if both:
        guard.suspend()  # so that it does not notice the end of the agent
    agent.kill()
    if both:
        guard.kill()
    code, out, err = finish(process)
    assert (code, out) == (1, "")
    why = "ssh exited with code 255" if both else "the agent was killed by signal 9 (SIGKILL)"
    assert err == f"horovodrun: host h1: the connection was lost: {why}\n"


def test_interrupt_while_an_agent_starts_others(cluster, tmp_path):
    began = tmp_path / "began"
    hang = f'case "$here $*" in "h1 "*" -- h3 "*) touch {began}; exec sleep 600;; esac'
    # Neither the end of a grace period nor that of another limit ends the job.
    patience = "job.GRACE_SECONDS = job._CLOSE_SECONDS = 600.0\nsys.exit"
    program = LOWERED.replace("sys.exit", patience)
    command = [sys.executable, "-c", program, "-np", 8, "-H", ALL, "--start-timeout", 600, *READY]
    process = cluster.popen(0, *command, env=wrapper(cluster, tmp_path, hang))
    until(began.exists, 40)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out, err) == (130, "", "horovodrun: interrupted; all ranks were ended\n")


def test_host_that_hangs_behind_another_is_named(cluster, tmp_path):
    hang = 'case "$*" in *" -- h7 "*) exec sleep 600;; esac'
    env = wrapper(cluster, tmp_path, hang)
    limit = round(scaled(6))  # in which the agents of all other hosts answer
    code, out, err = finish(start(cluster, "--start-timeout", limit, "true", env=env))
    assert (code, out, err) == (1, "", f"horovodrun: no answer from h7 within {limit} s\n")


def test_ranks_of_all_levels_end_when_the_launcher_is_killed(cluster):
    process = start(cluster, *READY)
    wait_for(process, "ready", 8)
    process.kill()
    finish(process)
    cluster.wait_gone()


@pytest.mark.parametrize("both", [False, True], ids=["agent", "agent and guard"])
def test_job_ends_when_an_agent_with_others_behind_it_is_killed(cluster, both):
    # Without agent and guard, nobody ends a daemon of a rank on another host.
    process = start(cluster, *(["sh", "-c", "echo ready; exec sleep 600"] if both else READY))
    wait_for(process, "ready", 8)
    guard, agent = agents(cluster, "h1")
    if both:
        guard.suspend()
    agent.kill()
    if both:
        guard.kill()
    code, _, err = finish(process)
    assert code == 1
    why = "ssh exited with code 255" if both else "the agent was killed by signal 9 (SIGKILL)"
    assert err == f"horovodrun: host h1: the connection was lost: {why}; all ranks were ended\n"


@pytest.mark.parametrize("host", ["h3", "h7"])
def test_lost_agent_behind_others_is_named(cluster, host):
    process = start(cluster, *READY)
    wait_for(process, "ready", 8)
    _, agent = agents(cluster, host)
    agent.kill()
    code, _, err = finish(process)
    assert code == 1
    why = "the agent was killed by signal 9 (SIGKILL)"
    assert err == f"horovodrun: host {host}: the connection was lost: {why}; all ranks were ended\n"


def test_lost_ssh_between_agents_is_named(cluster):
    process = start(cluster, *READY)
    wait_for(process, "ready", 8)
    ssh_of(cluster, "h1")["h3"].kill()
    code, _, err = finish(process)
    assert code == 1
    why = "ssh was killed by signal 9 (SIGKILL)"
    assert err == f"horovodrun: host h3: the connection was lost: {why}; all ranks were ended\n"


@pytest.mark.short(failure=True)
def test_lost_host_is_named_and_not_those_behind_it(cluster):
    limit = round(scaled(1))
    process = start(cluster, "--gloo-timeout-seconds", limit, *READY)
    wait_for(process, "ready", 8)
    cluster.link(1, "down")
    try:
        code, _, err = finish(process)
        assert (code, err) == (
            1,
            f"horovodrun: host h1: no sign of life for {limit + 2} s; all ranks were ended\n",
        )
        cluster.wait_gone(40)
    finally:
        cluster.link(1, "up")


def test_ranks_have_time_to_end(cluster):
    """An interrupted job ends the ranks with SIGTERM, and ssh between hosts lasts until their last words."""
    words = (
        "import os, signal, sys, time\n"
        "def end(*_): time.sleep(0.5); print('last words', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = start(cluster, sys.executable, "-c", words)
    wait_for(process, "ready", 8)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert (code, err) == (143, "horovodrun: terminated; all ranks were ended\n")
    assert out.count("last words") == 8


def test_first_failure_on_a_leaf(cluster):
    program = "import os, signal\nif os.environ['HOROVOD_RANK'] == '7': os._exit(7)\nsignal.pause()"
    code, out, err = finish(start(cluster, sys.executable, "-c", program))
    assert (code, out, err) == (
        7,
        "",
        "horovodrun: rank 7 exited with code 7; the other ranks were ended\n",
    )


def test_ranks_of_an_agent_with_others_behind_it_end_first(cluster, tmp_path):
    """Processes that ranks leave behind end with the ranks of their host, while the agent serves other hosts."""
    gone = tmp_path / "gone"
    program = (
        "import os, subprocess, sys, time\n"
        "rank = int(os.environ['HOROVOD_RANK'])\n"
        "if rank == 1:\n"
        f"    subprocess.Popen(['sh', '-c', 'trap \"touch {gone}; exit\" TERM; sleep 600 & wait'],\n"
        "        start_new_session=True)\n"
        f"while rank == 7 and not os.path.exists('{gone}'): time.sleep(0.02)\n"
        "print('done')\n"
    )
    code, out, err = finish(start(cluster, sys.executable, "-c", program))
    assert (code, out.count("done"), err) == (0, 8, "")


def test_suspended_launcher_is_not_lost_by_leaves(cluster, tmp_path):
    """The ranks run for longer than the limit of silence, 2 s more than that of the ranks, while the launcher is
    suspended."""
    limit = round(scaled(1))
    program = (
        "import os, signal, time\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists('{tmp_path}/suspended'): time.sleep(0.02)\n"
        f"time.sleep({limit + 3.5})\n"
        f"open('{tmp_path}/' + os.environ['HOROVOD_RANK'], 'w').close()\n"
        "print('end')\n"
    )
    process = start(cluster, "--gloo-timeout-seconds", limit, sys.executable, "-c", program)
    wait_for(process, "ready", 8)
    launcher = psutil.Process(process.pid)
    process.send_signal(signal.SIGTSTP)
    until(lambda: launcher.status() == psutil.STATUS_STOPPED)
    (tmp_path / "suspended").touch()
    until(lambda: all((tmp_path / str(rank)).exists() for rank in range(8)), 40)
    process.send_signal(signal.SIGCONT)
    code, out, err = finish(process)
    assert (code, out.count("end"), err) == (0, 8, "")
