"""The start of a job: what the agents are told, and when. No agent runs: their commands stay queued."""

import contextlib
import json
import struct
import time
import types

import pytest

from horoplug import __version__
from horoplug.runner.agent import agent
from horoplug.runner.ending.outcome import Outcome
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.job.description import JobDescription
from horoplug.runner.job.policy import JobState
from horoplug.runner.job.spec import JobSpec
from horoplug.runner.job.static import StaticPolicy, prescribed_interface
from horoplug.runner.network.preflight import StartError
from horoplug.runner.start import agents
from horoplug.runner.start.agents import Agents
from horoplug.runner.start.connection import LostError
from horoplug.runner.start.ssh import END_OF_SOURCE, Ssh

REMOTE = [
    Placement("a.invalid", is_local=False, ranks=(0, 1)),
    Placement("b.invalid", is_local=False, ranks=(2,)),
]


class RemoteJob:
    """The start of a job on two other hosts that ssh never connects to; the test imitates their probes."""

    def __init__(self, began=None, seconds=600.0, ssh=("ssh",)):
        self.agents = Agents(60.0, 5.0, 15.0)
        self.said = []
        began = time.monotonic() if began is None else began
        spec = JobSpec(["train"], 3, REMOTE, began, ssh=Ssh(ssh))
        self.state = JobState(
            spec,
            JobDescription(spec, silence=60.0, grace=5.0),
            self.agents,
            Outcome(3, 5.0),
            types.SimpleNamespace(say=self.said.append),
            seconds,
            interfaces=["lo"],
        )
        self.startup = StaticPolicy(self.state)

    def commands(self, number):
        """The queued commands to the agent of a host, which are taken out of the queue."""
        queue = self.agents.all[number]._outbox
        start = queue.find(END_OF_SOURCE) + 1 if queue.startswith(b'"""') else 0
        found = []
        while start < len(queue):
            kind, length = agent.COMMAND.unpack_from(queue, start)
            start += agent.COMMAND.size + length
            found.append((kind, bytes(queue[start - length : start])))
        queue.clear()
        return found

    def kinds(self):
        return [[kind for kind, _ in self.commands(number)] for number in range(len(REMOTE))]

    def answer(self, number, kind=agent.STDOUT, payload=None, **message):
        if payload is None:
            payload = json.dumps(message).encode() + b"\n"
        self.startup.probed(self.agents.all[number], kind, payload)

    def reach_launcher(self):
        for number in range(len(REMOTE)):
            self.answer(number, hello={"version": __version__})
            self.answer(number, launcher={"number": 0, "own": "127.0.0.1"})

    def reach_each_other(self):
        for number in range(len(REMOTE)):
            self.answer(number, listening=5000 + number)
        self.answer(1, peer={"number": 0, "own": "127.0.0.1"})
        self.startup.advance(time.monotonic())


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(agents, "CONNECTING", 0)
    with contextlib.ExitStack() as stack:

        def start(**options):
            job = RemoteJob(**options)
            stack.callback(job.startup.close)
            return job

        yield start


def test_hosts_are_checked_before_ranks_start(start):
    job = start()
    job.startup.begin()
    assert job.kinds() == [[b"C", b"M"]] * 2
    job.reach_launcher()
    assert job.kinds() == [[b"M"]] * 2
    assert (job.state.server, job.said) == (None, [])
    assert job.startup.due is not None


def test_ranks_start_once_all_hosts_reach_each_other(start):
    job = start()
    job.startup.begin()
    job.reach_launcher()
    job.kinds()
    job.reach_each_other()
    assert job.said == ["rendezvous on {}:{}".format(*job.state.server.address)]
    assert job.startup.due is None
    for number, host in enumerate(REMOTE):
        kind, payload = job.commands(number)[-1]
        description = json.loads(payload)
        assert kind == b"J"
        assert [each["rank"] for each in description["ranks"]] == list(host.ranks)
        assert description["command"] == ["train"]


def test_a_job_begins_although_the_folder_of_the_launcher_has_been_removed(
    start, tmp_path, monkeypatch
):
    """The agents then say that there is no such folder."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    job = start()
    folder.rmdir()
    job.startup.begin()
    job.reach_launcher()
    job.reach_each_other()
    assert json.loads(job.commands(0)[-1][1])["cwd"] == str(folder)


def test_frames_of_probes_are_ignored_once_ranks_start(start):
    job = start()
    job.startup.begin()
    job.reach_launcher()
    job.reach_each_other()
    job.kinds()
    job.answer(0, b"X", struct.pack("!i", -9))
    job.startup.advance(time.monotonic())
    assert job.kinds() == [[], []]


def test_failed_probe_names_its_host(start):
    job = start()
    job.startup.begin()
    job.answer(1, agent.STDERR, b"ImportError: No module named 'horoplug'\n")
    message = "^host b.invalid: horoplug is not installed for the Python there"
    job.answer(1, b"X", struct.pack("!i", 1))
    with pytest.raises(StartError, match=message):
        job.startup.advance(time.monotonic())
    assert job.state.server is None


def test_start_timeout_names_the_silent_hosts(start):
    job = start(began=time.monotonic() - 3.0, seconds=2.0)
    job.startup.begin()
    job.answer(0, hello={"version": __version__})
    message = "^no answer from b.invalid within 2 s$"
    with pytest.raises(StartError, match=message):
        job.startup.advance(time.monotonic())


def test_missing_ssh_is_an_error_of_the_start():
    job = RemoteJob(ssh=("/nonesuch/ssh",))
    with contextlib.closing(job.startup), pytest.raises(LostError, match=r"^/nonesuch/ssh cannot"):
        job.startup.begin()


def test_prescribed_interface_is_that_of_ranks_on_this_host():
    local = [Placement("localhost", is_local=True, ranks=(0,))]
    assert prescribed_interface(local, ["nonesuch0", "lo"]) == "lo"
    assert prescribed_interface(local, []) is None
    assert prescribed_interface([*local, *REMOTE], ["lo"]) is None
    with pytest.raises(ValueError, match="no network interface nonesuch0"):
        prescribed_interface(local, ["nonesuch0"])
