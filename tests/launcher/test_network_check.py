"""The check of the hosts of an elastic job, which come at different times. The tests imitate agents and probes."""

import json
import struct
import time

import pytest

import horoplug
from horoplug.runner.agent import agent
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.network.network_check import NetworkCheck
from horoplug.runner.terms import COMMAND_LINE

SECONDS = 30.0  # limit for a probe to answer
PATIENCE = 5.0


class Host:
    """A connection to an agent. Its probe answers, and reaches everything, unless the test has it do otherwise."""

    def __init__(self, name, is_local=False):
        self.host = Placement(name, is_local, ())
        self.greeted = False
        self.probes = self.ended = 0
        self.is_running = False
        self.lines = []

    def send(self, kind, payload=b""):
        if kind == agent.PROBE:
            assert not self.is_running, "the probe of an earlier round still runs"
            self.is_running, self.probes, self.lines = True, self.probes + 1, []
        elif kind == agent.PROBE_INPUT and payload:
            self.lines.append(json.loads(payload))
        elif kind == agent.PROBE_INPUT:
            self.ended += 1


class Check:
    """A check, whose clock stands still until the test lets time pass."""

    def __init__(self):
        self.now = time.monotonic()
        self.check = NetworkCheck(
            (), b"s" * 32, (), SECONDS, COMMAND_LINE, lambda host: host.name.encode()
        )

    def add(self, host):
        self.check.add(host)
        return host

    def say(self, host, **message):
        self.check.feed(host, agent.STDOUT, json.dumps(message).encode() + b"\n")

    def advance(self):
        return [(host.host.name, why) for host, why in self.check.advance(self.now)]

    def answer(self, *hosts):
        """Let probes answer what they were asked until there are no further questions. Returns the results."""
        results = []
        while True:
            results += self.advance()
            asked = [(host, host.lines.pop(0)) for host in hosts if host.is_running and host.lines]
            if not asked:
                return results
            for host, line in asked:
                host.greeted = True
                if "candidates" in line:
                    self.say(host, hello={"version": horoplug.__version__})
                    for number in range(len(line["candidates"])):
                        self.say(host, launcher={"number": number, "own": "10.0.0.9"})
                if "listen" in line:
                    self.say(host, listening=5)
                for peer, *_ in line.get("peers", ()):
                    self.say(host, peer={"number": peer, "own": "10.0.0.9"})

    def end(self, host, code=-9):
        """The probe of a host ends."""
        host.is_running = False
        self.check.feed(host, agent.ENDED, struct.pack("!i", code))


@pytest.fixture
def check():
    made = Check()
    yield made
    if made.check.server is not None:
        made.check.server.close()
    made.check.close()


def test_processes_of_the_launchers_own_host_start_without_probe(check):
    own = check.add(Host("here", is_local=True))
    assert check.advance() == [("here", "")]
    assert check.check.is_member(own)
    assert check.check.server is not None
    assert own.probes == 0
    assert check.check.due is None


def test_first_hosts_pass_together_and_probes_end(check):
    hosts = [check.add(Host("here", is_local=True)), check.add(Host("a")), check.add(Host("b"))]
    assert check.answer(*hosts[:2]) == []
    assert check.check.server is None
    assert check.answer(*hosts) == [("here", ""), ("a", ""), ("b", "")]
    assert check.advance() == []
    assert [(host.probes, host.ended) for host in hosts] == [(1, 1)] * 3
    assert check.check.due is None


def test_host_that_does_not_answer_keeps_others_waiting_for_a_moment_only(check):
    a, b = check.add(Host("a")), check.add(Host("b"))
    assert check.answer(a) == []
    assert check.check.due == pytest.approx(check.now + PATIENCE, abs=0.1)
    check.now += PATIENCE + 0.1
    assert check.answer(a) == [("a", "")]
    assert a.ended == 0  # b may have to reach it
    b.greeted = True
    assert check.advance() == []
    assert check.check.due == pytest.approx(check.now + SECONDS, abs=0.1)
    check.now += SECONDS + 0.1
    assert check.advance() == [("b", "no answer within 30 s")]
    assert check.advance() == []
    assert a.ended == 1


def test_later_host_is_checked_with_new_probes_of_the_others(check):
    a, b, c = check.add(Host("a")), Host("b"), Host("c")
    assert check.answer(a) == [("a", "")]
    check.add(b)
    assert check.answer(a, b) == []  # the earlier probe of a has not ended yet
    check.end(a)
    check.add(c)  # it never answers
    assert check.answer(a, b) == [("b", "")]
    assert (a.probes, b.probes) == (2, 1)
    check.check.drop(c)
    assert check.advance() == []
    assert (a.ended, b.ended) == (2, 1)


def test_member_whose_probe_fails_or_is_late_stays(check):
    a, b = check.add(Host("a")), Host("b")
    assert check.answer(a) == [("a", "")]
    check.end(a)
    check.add(b)
    assert check.answer(b) == []
    check.now += PATIENCE + 0.1
    assert check.answer(b) == [("b", "")]
    check.advance()
    for host in (a, b):
        check.end(host)
    c = check.add(Host("c"))
    check.advance()
    check.end(a, 1)
    assert check.answer(b, c) == [("c", "")]
    assert check.check.is_member(a)


def test_host_whose_probe_does_not_work_is_named(check):
    a, b = check.add(Host("a")), check.add(Host("b"))
    check.advance()
    check.check.feed(a, agent.STDERR, b"Traceback\nNo module named 'horoplug'\n")
    check.end(a, 1)
    text = "horoplug is not installed for the Python there (No module named 'horoplug')"
    assert check.advance() == [("a", text)]
    assert check.answer(b) == [("b", "")]


def test_nothing_is_due_when_the_only_host_that_has_answered_is_lost(check):
    a, b = check.add(Host("a")), check.add(Host("b"))
    assert check.answer(a) == []
    check.check.drop(a)
    check.advance()
    assert check.check.due is None
    assert check.answer(b) == [("b", "")]


def test_lost_host_is_not_waited_for(check):
    """In each phase of a round."""
    for phase in range(3):
        made = Check()
        a, b = made.add(Host("a")), made.add(Host("b"))
        for _ in range(phase):
            made.advance()
            line = b.lines.pop(0)
            if "candidates" in line:
                made.say(b, hello={"version": horoplug.__version__})
                for number in range(len(line["candidates"])):
                    made.say(b, launcher={"number": number, "own": "10.0.0.9"})
            results = made.answer(a)
            assert results == []
        made.check.drop(b)
        assert made.answer(a) == [("a", "")]
        made.check.server.close()
