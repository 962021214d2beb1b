"""The processes by which an agent reaches agents of further hosts, with programs of the test in place of ssh."""

import os
import signal
import subprocess

import pytest

from horoplug.runner.agent.agent import FIRST_TUNNEL, GREETING, Agent
from tests.harness.limits import scaled

FIRST, SECOND = FIRST_TUNNEL, FIRST_TUNNEL - 1


@pytest.fixture
def tunnels():
    """An agent, and a function that opens a tunnel to a program. Programs that run at the end are killed."""
    agent = Agent(None, os.getppid())
    started = []

    def open_tunnel(number, *command):
        agent._open_tunnel({"number": number, "command": command})
        _, process = next(each for each in agent._tunnels.values() if each[0] == number)
        started.append(process)
        return process

    yield agent, open_tunnel
    for process in started:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout, process.stderr):
            end.close()
    agent._selector.close()


def write_all(agent):
    """Write what is queued whenever a program reads, until nothing is left."""
    inputs = agent._inputs
    while any(each.unsent for each in inputs._open.values()):
        for key, _ in agent._selector.select(20):
            inputs.flush(key.fd)


def test_bytes_of_each_tunnel_arrive_in_order(tunnels):
    """Only the standard input of ranks is reported as taken."""
    agent, open_tunnel = tunnels
    programs = [open_tunnel(number, "sha256sum") for number in (FIRST, SECOND)]
    sent = [os.urandom(1 << 18) for _ in programs]
    for at in range(0, 1 << 18, 1000):
        for number, data in zip((FIRST, SECOND), sent, strict=True):
            agent._inputs.send(number, data[at : at + 1000])
    for number in (FIRST, SECOND):
        agent._inputs.send(number, b"")
    write_all(agent)
    for program, data in zip(programs, sent, strict=True):
        expected = subprocess.run(["sha256sum"], input=data, capture_output=True, check=True)
        assert program.wait(scaled(20)) == 0
        assert program.stdout.read() == expected.stdout
    assert agent._relay._outbox == GREETING


def test_end_closes_all_inputs(tunnels):
    agent, open_tunnel = tunnels
    programs = [open_tunnel(number, "cat") for number in (FIRST, SECOND)]
    agent._inputs.end()
    assert [program.wait(scaled(20)) for program in programs] == [0, 0]


def test_killing_one_tunnel_spares_the_others(tunnels):
    agent, open_tunnel = tunnels
    first, second = (open_tunnel(number, "sleep", "600") for number in (FIRST, SECOND))
    agent._kill_tunnels(FIRST)
    assert first.wait(scaled(20)) == -signal.SIGKILL
    assert second.poll() is None
    agent._kill_tunnels()
    assert second.wait(scaled(20)) == -signal.SIGKILL


def test_bytes_for_a_tunnel_that_has_ended_are_dropped(tunnels):
    agent, open_tunnel = tunnels
    program = open_tunnel(FIRST, "true")
    program.wait(scaled(20))
    agent._inputs.send(FIRST, b"x" * 1000)
    agent._inputs.drop(FIRST)
    agent._inputs.send(FIRST, b"x")
    assert program.stdin.closed
    assert not agent._inputs._open
