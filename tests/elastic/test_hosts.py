"""Elastic jobs on several hosts, which fail, come and go. Each host is a network namespace with an sshd."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.harness.limits import scaled
from tests.harness.netns import HURRIED, cluster_fixture, why_not
from tests.harness.netns import filtered as filtered
from tests.harness.netns import nothing_left as nothing_left
from tests.harness.support import until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

cluster = cluster_fixture(4)
# Two hosts in two networks, one of which has different link names, and a third host in the second network only.
two_networks = cluster_fixture(3, [[0, 1], [0, 1], [1]], ["eth", "ens", "eth"])

STEP_SECONDS = 0.02
# Trains until the file that is its argument exists. Prints a line for each membership, one every 20 steps, and one at
# the end. The sums are wrong if a step counts twice, or not at all.
PROGRAM = f"""
import os, sys, time
import numpy as np
import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn

slow = f"{{sys.argv[1]}}.slow{{os.environ['HOROPLUG_ELASTIC_PROCESS']}}"
me = f"process {{os.environ['HOROPLUG_ELASTIC_PROCESS']}} on {{os.environ['HOROVOD_HOSTNAME']}}"

def train(state):
    print(f"{{me}} pid {{os.getpid()}}: rank {{hvd.rank()}} of {{hvd.size()}}, step {{state.step}}")
    while True:
        ends = float(os.path.exists(sys.argv[1]))
        ones, votes = hvd.allreduce(np.array([1.0, ends]), op=hvd.Sum, name="step")
        assert ones == hvd.size()
        state.step += 1
        state.total += state.step
        if hvd.rank() == 0 and state.step % 20 == 0:
            print(f"at step {{state.step}} of {{hvd.size()}}")
        state.commit()
        if votes:
            return
        time.sleep({STEP_SECONDS} * (8 if os.path.exists(slow) else 1))

hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0)
run_fn(train, initialize_again)(state)
assert state.total == state.step * (state.step + 1) // 2
print(f"{{me}} done: {{state.step}} steps, size {{hvd.size()}}")
"""


class ElasticJob:
    """A launcher on host 0 that runs PROGRAM. :attr:`lines` has what it prints, on both streams."""

    def __init__(
        self, cluster, folder, *flags, later=1.0, patch="pass", timeout=3, slow=None, **env
    ):
        """``timeout``: seconds of HOROVOD_GLOO_TIMEOUT_SECONDS on a usual machine; ``later``: seconds after it at
        which a silent host is lost; ``patch``: runs before the launcher; ``slow``: a process that computes for longer;
        ``env``: variables."""
        self.timeout = round(scaled(timeout))
        self.lost_seconds = self.timeout + later
        self.stop = folder / "stop"
        program = folder / "train.py"
        program.write_text(PROGRAM)
        launcher = f"{HURRIED}; job._LATER = {later}; {patch}; sys.exit(launch.main())"
        limits = ["--gloo-timeout-seconds", self.timeout]
        command = [sys.executable, program, self.stop]
        if slow is not None:
            (folder / f"stop.slow{slow}").touch()
        arguments = [sys.executable, "-c", launcher, *limits, *flags, *command]
        self.process = cluster.popen(0, *arguments, env=env)
        self.lines = []
        self.step = 0  # with which the membership has begun that was waited for last
        self.readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream):
        with stream:
            for line in stream:
                self.lines.append(line)  # not extend(), which is not safe with two threads

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(scaled(30))

    @property
    def text(self):
        return "".join(self.lines)

    def said(self):
        """The launcher's own lines."""
        found = [line.rstrip("\n") for line in list(self.lines)]
        return [
            line.removeprefix("horovodrun: ") for line in found if line.startswith("horovodrun: ")
        ]

    def find(self, pattern):
        return [match for line in list(self.lines) if (match := re.search(pattern, line))]

    def wait_for(self, pattern, count=1, timeout=30):
        """The matches of the first ``count`` lines that match."""
        deadline = time.monotonic() + scaled(timeout)
        while len(found := self.find(pattern)) < count:
            assert time.monotonic() < deadline, f"no {pattern!r} after {timeout} s:\n{self.text}"
            assert self.process.poll() is None, f"no {pattern!r}:\n{self.text}"
            time.sleep(0.01)
        return found[:count]

    def wait_for_members(self, processes, timeout=30):
        """Wait until these processes, patterns of ``number on host`` by rank, are the members of a later membership.
        Returns the step with which it begins, and the lines' matches with the processes and their pids."""
        deadline = time.monotonic() + scaled(timeout)
        while True:
            begun = [
                {
                    int(match[3]): match
                    for match in self.find(
                        rf"process ({process}) pid (\d+): rank {rank} of {len(processes)}, step (\d+)"
                    )
                }
                for rank, process in enumerate(processes)
            ]
            common = {step for step in set.intersection(*map(set, begun)) if step >= self.step}
            if common:
                self.step = max(common)
                return self.step, [each[self.step] for each in begun]
            assert time.monotonic() < deadline, f"no {processes} after {timeout} s:\n{self.text}"
            assert self.process.poll() is None, f"no {processes}:\n{self.text}"
            time.sleep(0.01)

    def wait_for_steps(self, seconds=0.0):
        """Wait until the job has made some more steps, at least for a time. Returns the size that it had."""
        now = self.steps()
        wanted = now + 20 + seconds / STEP_SECONDS
        until(lambda: self.steps() >= wanted or self.process.poll() is not None, 20 + 3 * seconds)
        assert self.process.poll() is None, self.text
        return int(self.find(r"at step \d+ of (\d+)")[-1][1])

    def steps(self):
        return max([int(match[1]) for match in self.find(r"at step (\d+) ")], default=0)

    def finish(self, processes, timeout=30):
        """Let the program end. Checks that it ends well, on these processes, with the same steps."""
        self.stop.touch()
        try:
            code = self.process.wait(scaled(timeout))
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {timeout} s:\n{self.text}", pytrace=False)
        for reader in self.readers:
            reader.join(scaled(10))
        assert code == 0, self.text
        done = self.find(r"process (\d+ on \S+) done: (\d+) steps, size (\d+)")
        assert {match[1] for match in done} == set(processes), self.text
        assert {int(match[3]) for match in done} == {len(processes)}
        assert len({match[2] for match in done}) == 1, self.text


EXCLUDED = "; it gets no new processes for now"


def silent(job, host):
    """The launcher's line about a host that has been silent for too long."""
    return f"host {host}: no sign of life for {job.lost_seconds:g} s{EXCLUDED}"


def about(job, host):
    """The launcher's lines that begin with a host, without ssh's remark about a host that no test has used before."""
    lines = [line for line in job.said() if re.match(f"host {host}\\b", line)]
    return [line for line in lines if "Permanently added" not in line]


def pids_on(cluster, host):
    """The processes of a host, without its ssh servers."""
    space = cluster.space(cluster.names[host])
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    return cluster.processes().keys() & set(map(int, listed.stdout.split()))


# ---- lost hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.short(failure=True)
def test_lost_host_is_given_up_and_used_again_when_it_is_back(cluster, tmp_path):
    """A host's link goes down, and comes up later."""
    flags = ["-np", 3, "--min-np", 2, "-H", "h0,h1,h2", "--blacklist-cooldown-range", 2, 4]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0", "1 on h1", "2 on h2"])
        job.wait_for_steps()
        cluster.link(2, "down")
        try:
            began = time.monotonic()
            step, _ = job.wait_for_members(["0 on h0", "1 on h1"])
            assert time.monotonic() - began < 2 * job.timeout + scaled(5)
            assert step >= 20  # not from the beginning
            job.wait_for(f"^horovodrun: {silent(job, 'h2')}$")
        finally:
            cluster.link(2, "up")
        again, members = job.wait_for_members(["0 on h0", "1 on h1", "[3-9] on h2"])
        assert again > step
        # One line for each loss. A machine that is busy may try the host, and lose it, once more before the link is up;
        # each try has a process with a number of its own.
        tries = int(re.match(r"process (\d+)", members[2][0])[1]) - 2
        assert len([line for line in about(job, "h2") if "no sign of life" in line]) == tries
        job.finish([match[1] for match in members])


def test_state_survives_the_host_of_rank_0(cluster, tmp_path):
    with ElasticJob(cluster, tmp_path, "-np", 3, "--min-np", 2, "-H", "h1,h2,h3") as job:
        job.wait_for_members(["0 on h1", "1 on h2", "2 on h3"])
        job.wait_for_steps()
        cluster.link(1, "down")
        try:
            step, _ = job.wait_for_members(["1 on h2", "2 on h3"])
            assert step >= 20
            job.wait_for(f"^horovodrun: {silent(job, 'h1')}$")
            job.finish(["1 on h2", "2 on h3"])
        finally:
            cluster.link(1, "up")
        assert len(about(job, "h1")) == 1


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "the connection was lost: the agent was killed by signal 9 (SIGKILL)"),
        (signal.SIGTERM, "the agent was terminated"),
    ],
    ids=["killed", "terminated"],
)
def test_host_whose_agent_ends_is_lost(cluster, tmp_path, number, why):
    flags = ["-np", 3, "--min-np", 2, "-H", "h0:2,h1", "--blacklist-cooldown-range", 1, 2]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0", "1 on h0", "2 on h1"])
        job.wait_for_steps()
        # The agent's parent, which runs the same program, is not killed.
        agents = [pid for pid, text in cluster.processes().items() if "-c f=open(0" in text]
        (child,) = [pid for pid in agents if psutil.Process(pid).ppid() in agents]
        os.kill(child, number)
        step, _ = job.wait_for_members(["0 on h0", "1 on h0"])
        assert step >= 20
        _, members = job.wait_for_members(["0 on h0", "1 on h0", "[3-9] on h1"])
        job.finish([match[1] for match in members])
        assert about(job, "h1") == [f"host h1: {why}{EXCLUDED}"]


def test_job_starts_without_hosts_that_cannot_be_reached(cluster, tmp_path):
    """One host is unknown, one refuses ssh, and one accepts it and then does nothing."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\ncase "$*" in\n*" -- h2 "*) exec sleep 600;;\n'
        f'*" -- h3 "*) exec {cluster.ssh} -p 23 "$@";;\nesac\nexec {cluster.ssh} "$@"\n'
    )
    ssh.chmod(0o755)
    flags = ["-np", 5, "--min-np", 2, "-H", "h0,h1,h2,h3,nowhere", "--ssh", ssh]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0", "1 on h1"])
        job.wait_for_steps()
        job.finish(["0 on h0", "1 on h1"])
        assert about(job, "h2") == [silent(job, "h2")]
        refused = "ssh: connect to host h3 port 23: Connection refused"
        assert about(job, "h3") == [f"host h3: {refused}{EXCLUDED}"]
        (line,) = about(job, "nowhere")
        assert "Could not resolve hostname nowhere" in line


def test_end_does_not_wait_for_a_host_that_does_not_answer(cluster, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 600\n")
    ssh.chmod(0o755)
    flags = ["-np", 2, "--min-np", 1, "-H", "h0,h2", "--ssh", ssh, "--start-timeout", 2]
    with ElasticJob(cluster, tmp_path, *flags, timeout=30) as job:
        job.wait_for_members(["0 on h0"])
        began = time.monotonic()
        job.finish(["0 on h0"])
        assert time.monotonic() - began < scaled(10), job.text
        assert job.said() == []


def test_ssh_that_cannot_be_run_is_one_line(cluster, tmp_path):
    flags = ["-np", 3, "--min-np", 1, "-H", "h0,h1:2", "--ssh", tmp_path / "nonesuch"]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0"])
        job.finish(["0 on h0"])
        assert about(job, "h1") == [
            f"host h1: {tmp_path}/nonesuch cannot be run: No such file or directory{EXCLUDED}"
        ]


def test_more_hosts_than_are_connected_to_at_once(cluster, tmp_path):
    hosts = ["0 on h0", "1 on h1", "2 on h2", "3 on h3"]
    patch = "from horoplug.runner.start import agents; agents.CONNECTING = 1"
    flags = ["-np", 4, "--min-np", 4, "-H", "h0,h1,h2,h3"]
    with ElasticJob(cluster, tmp_path, *flags, patch=patch) as job:
        job.wait_for_members(hosts)
        job.finish(hosts)
        assert job.said() == []


def test_killed_process_is_replaced_with_encryption(cluster, tmp_path):
    with ElasticJob(
        cluster, tmp_path, "-np", 3, "--min-np", 2, "-H", "h0,h1:2", "--encrypt"
    ) as job:
        _, members = job.wait_for_members(["0 on h0", "1 on h1", "2 on h1"])
        job.wait_for_steps()
        os.kill(int(members[1][2]), signal.SIGKILL)
        step, _ = job.wait_for_members(["0 on h0", "2 on h1", "3 on h1"])
        assert step >= 20
        job.finish(["0 on h0", "2 on h1", "3 on h1"])
        assert job.said()[0] == ("process 1 (rank 1) on h1 was killed by signal 9 (SIGKILL)")


@pytest.mark.parametrize("hosts", ["h0,h1,h2", "h0,h1"])
def test_slow_process_is_replaced_by_one_on_another_host(cluster, tmp_path, hosts):
    """Without a free slot on another host, it is only reported."""
    flags = ["-np", 2, "--min-np", 1, "-H", hosts, "--replace-slow", 2]
    with ElasticJob(cluster, tmp_path, *flags, slow=1, HOROPLUG_SLOW_SECONDS="0.5") as job:
        job.wait_for_members(["0 on h0", "1 on h1"])
        if "h2" not in hosts:
            job.wait_for(
                r"^horovodrun: process 1 \(rank 1\) on h1 is slow: in the last 0\.\d s it computed"
            )
            job.wait_for_steps()
            job.finish(["0 on h0", "1 on h1"])
            return
        job.wait_for_members(["0 on h0", "2 on h2"])
        job.wait_for_steps()
        job.finish(["0 on h0", "2 on h2"])
        assert re.match(
            r"process 1 \(rank 1\) on h1 is replaced: in the last 0\.\d s it computed",
            job.said()[0],
        )
        assert job.said()[1] == "host h1 gets no new processes for now"


def test_processes_end_when_the_launcher_is_killed(cluster, tmp_path):
    """The process of another host that was replaced has belonged to the same agent."""
    with ElasticJob(cluster, tmp_path, "-np", 2, "--min-np", 1, "-H", "h0,h1") as job:
        _, members = job.wait_for_members(["0 on h0", "1 on h1"])
        os.kill(int(members[1][2]), signal.SIGKILL)
        job.wait_for_members(["0 on h0", "2 on h1"])
        job.process.kill()
        cluster.wait_gone()


# ---- the check of the network ----------------------------------------------------------------------------------------

HINT = "let firewalls pass TCP between the hosts, or choose a network with --network-interface"
NO_ANSWER = "no answer within 5 s"


def test_host_that_others_do_not_reach_is_left_out(cluster, tmp_path, filtered):
    filtered(1)
    with ElasticJob(cluster, tmp_path, "-np", 3, "--min-np", 2, "-H", "h0,h1,h2") as job:
        job.wait_for_members(["0 on h0", "2 on h2"])
        job.wait_for_steps()
        job.finish(["0 on h0", "2 on h2"])
        why = f"it is not reached: h0 does not reach h1 at 10.214.0.2: {NO_ANSWER}; {HINT}"
        assert about(job, "h1") == [f"host h1: {why}{EXCLUDED}"]
        assert "restoring" not in job.text


def test_host_that_does_not_reach_the_launcher_is_left_out(cluster, tmp_path, filtered):
    """All hosts but the launcher's own one, and the job ends, because two processes are needed."""
    filtered(0)
    with ElasticJob(cluster, tmp_path, "-np", 2, "--min-np", 2, "-H", "h0,h1") as job:
        assert job.process.wait(scaled(60)) == 1
        for reader in job.readers:
            reader.join(scaled(10))
        addresses = f"10.214.0.1 ({NO_ANSWER})"
        why = f"host h1: it does not reach this host at any of its addresses: {addresses}; {HINT}"
        assert job.said() == [
            why + EXCLUDED,
            f"fewer than 2 processes (--min-np) are left; {why}; the other ranks were ended",
        ]


def test_later_host_that_reaches_no_other_one_is_left_out(cluster, tmp_path, filtered):
    """Connections that the firewall of a host meets when they exist already go on."""
    hosts = tmp_path / "hosts"
    write(hosts, "h0", "h1")
    flags = ["--min-np", 2, "--host-discovery-script", f"cat {hosts}", "--verbose"]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0", "1 on h1"])
        until(lambda: not any("network.probe" in text for text in cluster.processes().values()))
        filtered(1)
        write(hosts, "h0", "h1", "h2")
        why = f"it does not reach h1 at 10.214.0.2: {NO_ANSWER}; {HINT}"
        job.wait_for(f"^horovodrun: {re.escape(f'host h2: {why}{EXCLUDED}')}$")
        assert job.wait_for_steps() == 2
        assert "goes on" not in job.text
        # The check of one host ends neither the processes of others, nor their probes, before it is over.
        until(lambda: not any("network.probe" in text for text in cluster.processes().values()))
        job.finish(["0 on h0", "1 on h1"])


def test_host_with_another_version_is_left_out_before_it_starts_processes(cluster, tmp_path):
    info = tmp_path / "horoplug-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horoplug\nVersion: 9.9\n")
    python = tmp_path / "python"
    newer = f'cd {tmp_path}; export PYTHONPATH="{tmp_path}:$PYTHONPATH"'
    python.write_text(f'#!/bin/sh\n{newer}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    flags = ["-np", 3, "--min-np", 1, "-H", "h0,h1:2", "--remote-python", python]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0"])
        job.finish(["0 on h0"])
        (line,) = about(job, "h1")
        text = (
            "host h1: it has horoplug 9.9, and this host [0-9.]+: all hosts need the same version"
        )
        assert re.fullmatch(text + EXCLUDED, line)


@pytest.mark.parametrize("chosen", [True, False])
def test_hosts_use_a_network_that_all_of_them_have(two_networks, tmp_path, chosen):
    """Each host has its own name for it. Without a choice, it is found."""
    flags = ["--network-interface", "eth1,ens1"] if chosen else []
    with ElasticJob(
        two_networks, tmp_path, "-np", 3, "--min-np", 3, "-H", "h0,h1,h2", *flags, "--verbose"
    ) as job:
        job.wait_for_members(["0 on h0", "1 on h1", "2 on h2"])
        job.wait_for("rendezvous on 10.214.1.1:")
        job.finish(["0 on h0", "1 on h1", "2 on h2"])


# ---- discovery -------------------------------------------------------------------------------------------------------


def write(path, *lines):
    """Replace a file at once, as its readers see it."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


@pytest.mark.short
def test_hosts_are_added_and_removed_in_the_middle_of_a_job(cluster, tmp_path):
    """The first host is the launcher's own one. Another one joins, for longer than a silent host may be, leaves, is
    disconnected meanwhile, and joins again. No state is restored, since nothing fails."""
    hosts = tmp_path / "hosts"
    write(hosts, "h0:2")
    flags = ["--min-np", 2, "--max-np", 4, "--host-discovery-script", f"cat {hosts}", "--verbose"]
    with ElasticJob(cluster, tmp_path, *flags, timeout=2, later=0.5) as job:
        job.wait_for_members(["0 on h0", "1 on h0"])
        job.wait_for_steps()
        write(hosts, "h0:2", "h1:2")
        four = ["0 on h0", "1 on h0", "[23] on h1", "[23] on h1"]
        step, _ = job.wait_for_members(four)
        assert step >= 20
        assert job.wait_for_steps(job.lost_seconds + 1) == 4

        write(hosts, "h0:2")
        job.wait_for("^horovodrun: process [23] exited with code 0$", 2)
        until(lambda: not pids_on(cluster, 1))
        cluster.link(1, "down")
        try:
            assert job.wait_for_steps(job.lost_seconds + 1) == 2
        finally:
            cluster.link(1, "up")

        write(hosts, "h1:1", "h0:2")
        job.wait_for_members(["0 on h0", "1 on h0", "4 on h1"])
        job.finish(["0 on h0", "1 on h0", "4 on h1"])
        assert "restoring" not in job.text
        assert not about(job, "h1")
        ends = job.find("process . (exited|was)")
        assert len(ends) == 5
        assert all("exited with code 0" in match.string for match in ends)


def test_launchers_own_host_is_removed(cluster, tmp_path):
    """Rank 0 leaves, and another process continues with its state."""
    hosts = tmp_path / "hosts"
    write(hosts, "h0", "h1", "h2")
    flags = ["--min-np", 2, "--host-discovery-script", f"cat {hosts}"]
    with ElasticJob(cluster, tmp_path, *flags) as job:
        job.wait_for_members(["0 on h0", "1 on h1", "2 on h2"])
        job.wait_for_steps()
        write(hosts, "h1", "h2")
        step, _ = job.wait_for_members(["1 on h1", "2 on h2"])
        assert step >= 20
        job.finish(["1 on h1", "2 on h2"])
        assert "restoring" not in job.text
        assert not about(job, "h0")


# Each: what the script does in place of printing the hosts, and the line about it.
WRONG = [
    ("echo 'no hosts today' >&2; exit 3", "{script} failed with exit code 3: no hosts today"),
    ("kill -9 $$", "{script} failed with exit code 137: Killed"),
    ("sleep 600", "{script} did not end within {limit} s"),
    (
        "echo '!?'; echo '-oProxyCommand=x'",
        "{script}: line 1: host or host:slots is wanted, not '!?'",
    ),
    ("yes h0", "{script} printed more than 1048576 bytes"),
    (
        "printf 'h0\\nh1\\n\\377\\376:9\\n'",
        "line 3: host or host:slots is wanted, not '\ufffd\ufffd:9'",
    ),
    ("printf 'h0\\nh0:3\\nh1\\n'", "line 2: the host h0 is named twice"),
    ("echo h0:0; echo h1:0", "it has found no hosts"),
]


def test_wrong_output_of_the_discovery_script_is_reported_once(cluster, tmp_path):
    """The job goes on with the hosts that it has, whatever the script does, and uses its next correct output."""
    script, body, runs = (tmp_path / name for name in ("find", "body.sh", "runs"))
    script.write_text(f"#!/bin/sh\necho run >>{runs}\n. {body}\n")
    script.chmod(0o755)
    write(body, "echo h0; echo h1")
    limit = round(scaled(1))
    patch = (
        "from horoplug.runner.elastic import discovery, inbox; "
        "inbox.DISCOVERY_SECONDS = 0.1; "
        f"script = discovery.HostDiscoveryScript; script.__init__.__kwdefaults__['timeout'] = {limit}"
    )
    flags = ["--min-np", 2, "--host-discovery-script", script]

    def run_again(times):
        wanted = runs.stat().st_size + times * len("run\n")
        until(lambda: runs.stat().st_size >= wanted)

    with ElasticJob(cluster, tmp_path, *flags, patch=patch) as job:
        job.wait_for_members(["0 on h0", "1 on h1"])
        for text, line in WRONG:
            write(body, text)
            line = f"host discovery: {line.format(script=script, limit=limit)}"
            job.wait_for(f"^horovodrun: {re.escape(line)}$")
            run_again(2)
            assert job.wait_for_steps() == 2
            assert job.said()[-1] == line
        # Nothing changed for the launcher, which therefore has said it once.
        write(body, "true")
        run_again(3)
        assert job.wait_for_steps() == 2
        assert job.said()[-1] == "host discovery: it has found no hosts"
        write(body, "echo h0; echo h1; echo h2")
        job.wait_for_members(["0 on h0", "1 on h1", "2 on h2"])
        write(body, "sleep 600")
        run_again(2)
        job.finish(["0 on h0", "1 on h1", "2 on h2"])
        assert len(job.find("host discovery")) <= len(WRONG) + 1  # the last run may be reported
        assert len(job.find("goes on with 3 processes")) == 1
