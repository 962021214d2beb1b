"""The connections to agents that other agents have started. No agent runs: the test sets when each was heard."""

import pytest

from horoplug.runner.agent import agent
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.start import agents, spawn_tree
from horoplug.runner.start.ssh import Ssh
from horoplug.runner.start.starters import SshStarter


@pytest.fixture
def chain(monkeypatch):
    """Three hosts, each of which is reached through the one before."""
    monkeypatch.setattr(agents, "CONNECTING", 0)
    monkeypatch.setattr(spawn_tree, "MOST_DIRECT", 1)
    monkeypatch.setattr(spawn_tree, "FAN_OUT", 1)
    made = agents.Agents(lost_seconds=40.0, ping_seconds=5.0, quiet_seconds=15.0)
    hosts = [Placement(name, is_local=False, ranks=(0,)) for name in "abc"]
    made.start(hosts, SshStarter(Ssh(), 5.0))
    return made


@pytest.mark.parametrize(
    ("heard", "cause"),
    [
        ((100.0, 99.0, 60.0), 2),
        ((100.0, 63.0, 60.0), 1),
        ((64.0, 63.0, 60.0), 0),
    ],
    ids=["leaf", "host before it", "first host"],
)
def test_first_silent_host_on_the_way_is_lost(chain, heard, cause):
    for connection, when in zip(chain.all, heard, strict=True):
        connection.heard = when
    assert chain.cause_of_silence(chain.all[2], 101.0) is chain.all[cause]


def test_suspension_is_the_last_frame_to_an_agent_that_has_started_others(chain, monkeypatch):
    told = []
    for connection in chain.all:
        monkeypatch.setattr(connection, "send", lambda kind, to=connection: told.append((to, kind)))
    chain.announce_suspension()
    assert told == [(connection, agent.SUSPENDED) for connection in reversed(chain.all)]
