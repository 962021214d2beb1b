"""What starts agents: the launcher itself, on its own host, and ssh. A scheduler's step is in step.py."""

from __future__ import annotations

import abc
import sys
import threading
from pathlib import Path

from horoplug.runner.agent import agent
from horoplug.runner.agent.links import PipeLink, ProcessLink, Sender, Tunnel
from horoplug.runner.agent.source import agent_source
from horoplug.runner.hosts.hosts import Placement

from .ssh import END_OF_SOURCE, Ssh


class AgentStarter(abc.ABC):
    """Starts the agents of some hosts."""

    name: str
    """The program that starts them, for messages."""
    is_limited = False
    """Whether only some connections may be made at once."""
    ends_as_one = False
    """Whether the agents and their ranks may be killed together, in any order."""

    @abc.abstractmethod
    def link(self, host: Placement, lock: threading.RLock) -> PipeLink:
        """The way to the agent of a host, before :meth:`start`. ``lock``: that of its queue."""

    def tunnel(self, host: Placement, parent: Sender, number: int) -> Tunnel:
        """The way to the agent of a host that the agent of another host starts, if there are such ways. The other
        arguments are those of :class:`horoplug.runner.agent.links.Tunnel`."""
        raise NotImplementedError

    def start(self) -> None:  # noqa: B027
        """Make what all agents need. Idempotent. Errors: OSError."""

    def end(self, seconds: float) -> None:  # noqa: B027
        """End what :meth:`start` has made, after at most ``seconds``. Idempotent."""


class LocalStarter(AgentStarter):
    """Starts the agent of this host, as a child process."""

    name = "Python"

    def link(self, host: Placement, lock: threading.RLock) -> PipeLink:
        # By path and without site-packages, so that it starts in a few milliseconds.
        path = Path(agent.__file__).resolve()
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(path)]
        return ProcessLink(command, b"", lock, own_stderr=True)


class SshStarter(AgentStarter):
    """Starts agents by ssh; with many hosts, those of some hosts start those of others (spawn_tree.py)."""

    name = "ssh"
    is_limited = True

    def __init__(self, ssh: Ssh, connect_seconds: float) -> None:
        """``connect_seconds``: limit for ssh to connect."""
        self._ssh = ssh
        self._connect_seconds = connect_seconds

    def link(self, host: Placement, lock: threading.RLock) -> PipeLink:
        command = self._ssh.command(host.name, self._connect_seconds)
        return ProcessLink(command, source(), lock, own_stderr=False)

    def tunnel(self, host: Placement, parent: Sender, number: int) -> Tunnel:
        # Half of the time, so that the launcher can still connect itself.
        command = self._ssh.command(host.name, self._connect_seconds / 2)
        return Tunnel(parent, number, command, source())


def source() -> bytes:
    """What an agent that is not started by path gets first."""
    return agent_source() + END_OF_SOURCE
