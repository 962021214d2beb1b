"""What differs between jobs of a fixed size and elastic jobs (:class:`Policy`), and what they share."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Sequence

from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.agent import agent
from horoplug.runner.ending.outcome import Outcome
from horoplug.runner.network.network_check import NetworkCheck
from horoplug.runner.network.servers import candidates
from horoplug.runner.output.console import Console
from horoplug.runner.start.agents import Agents
from horoplug.runner.start.connection import AgentConnection
from horoplug.runner.start.starters import AgentStarter, SshStarter
from horoplug.runner.start.step import Step

from .description import JobDescription
from .spec import JobSpec


@dataclasses.dataclass
class JobState:
    """A job that runs: what its loop (:mod:`horoplug.runner.job.job`) and its policy share."""

    spec: JobSpec
    description: JobDescription
    agents: Agents
    outcome: Outcome
    console: Console
    start_seconds: float
    """Limit of the start, counted from the beginning of the job."""
    interfaces: Sequence[str] = ()
    """Names of the network interfaces to use; empty: any."""
    own_interface: str | None = None
    """The one on which ranks listen if all are on this host; None: any."""
    secret: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(32))
    server: StoreServer | None = None
    """The rendezvous; None until its address is known."""

    def listen(self, server: StoreServer) -> None:
        """Ranks may start: this is their rendezvous."""
        self.server = server
        self.outcome.ranks_can_run()
        self.console.say("rendezvous on {}:{}".format(*server.address))
        self.description.begin(server.address, self.secret)

    def starter(self, connect_seconds: float) -> AgentStarter:
        """What starts agents on other hosts. ``connect_seconds``: limit for ssh to connect. Errors: StartError."""
        spec = self.spec
        if spec.step is None:
            return SshStarter(spec.ssh, connect_seconds)
        addresses = candidates(spec.hosts, self.interfaces, spec.terms)
        return Step(spec.step, self.secret, addresses, spec.terms)

    def fail(
        self, text: str, code: int = 1, *, all_ranks: bool = False, process: int | None = None
    ) -> None:
        """End the job because of a failure. The arguments are those of the outcome's method."""
        now = time.monotonic()
        self.outcome.fail(text, now, code, all_ranks=all_ranks, process=process)
        self.agents.send(agent.TERMINATE)

    def lose(self, connection: AgentConnection, why: str) -> None:
        """End the job because a host is lost. Processes on another host are ended by their agent, those on this host
        by the job."""
        name = connection.host.name
        for each in self.agents.drop(connection):
            self.outcome.ranks_lost(each.host.ranks)
            if self.server is not None:
                for rank in each.host.ranks:
                    text = f"rank {rank} is on {each.host.name}, which is lost"
                    self.server.mark_lost(rank, text)
        self.fail(why if connection.host.is_local else f"host {name}: {why}", all_ranks=True)


class Policy(abc.ABC):
    """Decides which agents and ranks are started, and what follows when a rank ends or a host is lost."""

    wakeups: Sequence[int] = ()
    """Nonblocking descriptors that end the wait of the loop."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._check: NetworkCheck | None = None
        """None: all ranks are, and will be, on this host."""

    @property
    @abc.abstractmethod
    def members(self) -> Sequence[int]:
        """The numbers of the processes, by rank."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Start the agents. Errors: StartError, LostError."""

    @property
    def waits(self) -> bool:
        """Whether the job goes on although no agent runs."""
        return False

    @property
    @abc.abstractmethod
    def due(self) -> float | None:
        """When to call :meth:`advance` (``time.monotonic()``), if nothing happens before; None: never."""

    @abc.abstractmethod
    def advance(self, now: float) -> None:
        """Do what is due, while the job is not ending. Errors: StartError, LostError."""

    def probed(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe, while the job is not ending. Errors: StartError."""
        if self._check is not None:
            self._check.feed(connection, kind, payload)

    @abc.abstractmethod
    def rank_ended(self, connection: AgentConnection, rank: int, code: int) -> None:
        """A rank's process has ended."""

    @abc.abstractmethod
    def not_started(self, connection: AgentConnection, rank: int, text: str) -> None:
        """A rank could not be started; ``text``: why."""

    @abc.abstractmethod
    def lost(self, connection: AgentConnection, why: str) -> None:
        """A host is lost. Called also while the job is ending."""

    def agent_ended(self, connection: AgentConnection) -> None:  # noqa: B027
        """An agent has ended all its processes. Called also while the job is ending."""

    def noticed(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the policy may handle further signals."""
        return contextlib.nullcontext()

    def stop(self) -> None:  # noqa: B027
        """The job has ended; its processes are ended next."""

    def close(self) -> None:
        """All processes have ended."""
        if self._check is not None:
            self._check.close()
        if self._state.server is not None:
            self._state.server.close()
