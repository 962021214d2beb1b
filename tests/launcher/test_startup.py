"""The start of a job: what the agents are told, and when. No agent runs: their commands stay queued."""

import contextlib
import json
import struct
import sys
import time

import pytest

from horoplug import __version__
from horoplug.runner import agent, agents
from horoplug.runner.agent_connection import LostError
from horoplug.runner.agents import Agents
from horoplug.runner.hosts import Placement
from horoplug.runner.job_description import JobDescription
from horoplug.runner.preflight import StartError
from horoplug.runner.remote import END_OF_SOURCE, Ssh
from horoplug.runner.startup import Startup, prescribed_interface

REMOTE = [
    Placement("a.invalid", is_local=False, ranks=(0, 1)),
    Placement("b.invalid", is_local=False, ranks=(2,)),
]


class Talk:
    """The start of a job on two other hosts that ssh never connects to; the test imitates their probes."""

    def __init__(self, began=None, seconds=600.0, ssh=("ssh",)):
        self.agents = Agents(60.0, 5.0, 15.0)
        self.rendezvous = []
        description = JobDescription(
            ["train"], 3, {}, hosts=REMOTE, python=sys.executable, silence=60.0, grace=5.0
        )
        self.startup = Startup(
            self.agents,
            description,
            REMOTE,
            Ssh(ssh),
            interfaces=["lo"],
            own_interface=None,
            began=time.monotonic() if began is None else began,
            seconds=seconds,
            on_rendezvous=lambda *address: self.rendezvous.append(address),
        )

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
        self.startup.feed(self.agents.all[number], kind, payload)

    def reach_launcher(self):
        for number in range(len(REMOTE)):
            self.answer(number, hello={"version": __version__})
            self.answer(number, launcher={"number": 0, "own": "127.0.0.1"})

    def reach_each_other(self):
        for number in range(len(REMOTE)):
            self.answer(number, listening=5000 + number)
        self.answer(1, peer={"number": 0, "own": "127.0.0.1"})


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(agents, "CONNECTING", 0)
    with contextlib.ExitStack() as stack:

        def start(**options):
            talk = Talk(**options)
            stack.callback(talk.startup.close)
            return talk

        yield start


def test_hosts_are_checked_before_ranks_start(start):
    talk = start()
    talk.startup.begin()
    assert talk.kinds() == [[b"C", b"M"]] * 2
    talk.reach_launcher()
    assert talk.kinds() == [[b"M"]] * 2
    assert (talk.startup.server, talk.rendezvous) == (None, [])
    assert talk.startup.due is not None


def test_ranks_start_once_all_hosts_reach_each_other(start):
    talk = start()
    talk.startup.begin()
    talk.reach_launcher()
    talk.kinds()
    talk.reach_each_other()
    assert talk.rendezvous == [talk.startup.server.address]
    assert talk.startup.due is None
    for number, host in enumerate(REMOTE):
        kind, payload = talk.commands(number)[-1]
        job = json.loads(payload)
        assert kind == b"J"
        assert [each["rank"] for each in job["ranks"]] == list(host.ranks)
        assert job["command"] == ["train"]


def test_frames_of_probes_are_ignored_once_ranks_start(start):
    talk = start()
    talk.startup.begin()
    talk.reach_launcher()
    talk.reach_each_other()
    talk.kinds()
    talk.answer(0, b"X", struct.pack("!i", -9))
    talk.startup.advance()
    assert talk.kinds() == [[], []]


def test_failed_probe_names_its_host(start):
    talk = start()
    talk.startup.begin()
    talk.answer(1, agent.STDERR, b"ImportError: No module named 'horoplug'\n")
    message = "^host b.invalid: horoplug is not installed for the Python there"
    with pytest.raises(StartError, match=message):
        talk.answer(1, b"X", struct.pack("!i", 1))
    assert talk.startup.server is None


def test_start_timeout_names_the_silent_hosts(start):
    talk = start(began=time.monotonic() - 3.0, seconds=2.0)
    talk.startup.begin()
    talk.answer(0, hello={"version": __version__})
    message = "^no answer from b.invalid within 2 s$"
    with pytest.raises(StartError, match=message):
        talk.startup.advance()


def test_missing_ssh_is_an_error_of_the_start():
    talk = Talk(ssh=("/nonesuch/ssh",))
    with contextlib.closing(talk.startup), pytest.raises(LostError, match=r"^/nonesuch/ssh cannot"):
        talk.startup.begin()


def test_prescribed_interface_is_that_of_ranks_on_this_host():
    local = [Placement("localhost", is_local=True, ranks=(0,))]
    assert prescribed_interface(local, ["nonesuch0", "lo"]) == "lo"
    assert prescribed_interface(local, []) is None
    assert prescribed_interface([*local, *REMOTE], ["lo"]) is None
    with pytest.raises(ValueError, match="no network interface nonesuch0"):
        prescribed_interface(local, ["nonesuch0"])
