"""The probe that an agent runs beside the processes of an elastic job."""

import json
import os
import select
import signal
import struct

import pytest

from horoplug.runner.agent import agent
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.start.connection import AgentConnection
from horoplug.runner.start.starters import LocalStarter
from tests.harness.limits import scaled
from tests.harness.support import has_ended, until, wait_until_stopped


@pytest.fixture
def connection():
    """An agent on this host."""
    made = AgentConnection(Placement("here", is_local=True, ranks=(0,)), LocalStarter())
    made.start()
    yield made
    made.end(scaled(20))


def payload(*command, **further):
    env = {"PATH": os.environ["PATH"]}
    job = {"command": command, "cwd": "/", "env": env, "inherit": False, "silence": None}
    return json.dumps(job | {"grace": 5.0} | further).encode()


def frames(connection):
    """The frames of an agent, as they arrive."""
    poll = select.poll()
    poll.register(connection.link.stdout, select.POLLIN)
    while not connection.done:
        assert poll.poll(scaled(20) * 1000), "the agent sends nothing"
        yield from connection.receive()


def ended(code):
    return agent.ENDED, struct.pack("!i", code)


def test_probe_runs_beside_processes_and_ends_when_it_is_told_to_or_with_the_job(connection):
    arriving = frames(connection)

    def following(number):
        """The next frame about the probe or a rank."""
        return next((kind, text) for kind, rank, text in arriving if rank == number)

    connection.send(agent.PROBE, payload("cat"))
    connection.send(agent.PROBE_INPUT, b"before\n")
    assert following(agent.CHECK) == (agent.STDOUT, b"before\n")
    ranks = [{"rank": 0, "env": {}}]
    connection.send(agent.START, payload("sleep", "600", ranks=ranks, keep=True))
    assert following(0)[0] == agent.PID
    connection.send(agent.PROBE_INPUT, b"beside\n")
    assert following(agent.CHECK) == (agent.STDOUT, b"beside\n")
    connection.send(agent.PROBE_INPUT)
    assert following(agent.CHECK) == ended(-signal.SIGKILL)

    connection.send(agent.PROBE, payload("cat"))
    connection.send(agent.PROBE_INPUT, b"again\n")
    assert following(agent.CHECK) == (agent.STDOUT, b"again\n")
    connection.send(agent.FINISH)
    assert following(agent.CHECK) == ended(-signal.SIGKILL)
    connection.send(agent.KILL_RANK, agent.NUMBER.pack(0))
    assert following(0) == ended(-signal.SIGKILL)
    assert following(agent.CHECK) == (agent.DONE, b"")


def test_agent_notices_a_probe_that_ended_just_before_it_should_be_killed(connection):
    """The agent is stopped while its probe ends, so that the probe is a zombie when the agent wants to kill it."""
    arriving = frames(connection)
    connection.send(agent.PROBE, payload("sh", "-c", "echo $$ $PPID; exec cat"))
    probe, its_agent = map(int, next(text for kind, _, text in arriving).split())
    os.kill(its_agent, signal.SIGSTOP)
    wait_until_stopped(its_agent)
    os.kill(probe, signal.SIGTERM)
    until(lambda: has_ended(probe))
    connection.send(agent.FINISH)
    os.kill(its_agent, signal.SIGCONT)
    found = [(kind, text) for kind, _, text in arriving]
    assert found == [ended(-signal.SIGTERM), (agent.DONE, b"")]
