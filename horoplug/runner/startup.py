"""The start of a job: connects to the agents, checks the hosts, serves the rendezvous, and starts the ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.store.server import StoreServer

from . import agent
from .agent_connection import AgentConnection
from .agents import Agents
from .hosts import Placement
from .job_description import JobDescription
from .network_check import NetworkCheck, candidates
from .remote import Ssh
from .slurm_step import SlurmStep
from .srun import Srun

_CONNECT_SECONDS = 10.0  # limit for ssh to connect, unless the start timeout is short


class Startup:
    """Starts one job. With ranks on this host only, they start at once; with other hosts, after a network check."""

    def __init__(
        self,
        agents: Agents,
        description: JobDescription,
        hosts: Sequence[Placement],
        ssh: Ssh,
        *,
        interfaces: Sequence[str],
        own_interface: str | None,
        began: float,
        seconds: float,
        on_rendezvous: Callable[[str, int], None],
        srun: Srun | None = None,
    ) -> None:
        """``hosts``: the hosts and their ranks; ``ssh``: how to reach other hosts; ``interfaces``: names of the network
        interfaces to use, empty: any; ``own_interface``: the one on which ranks listen if all are on this host, None:
        any; ``seconds``: limit of the start, counted from ``began`` (``time.monotonic()``); ``on_rendezvous``: called
        with the address and port of the rendezvous before the ranks start; ``srun``: starts the agents
        of other hosts instead of ssh."""
        self.server: StoreServer | None = None
        """The rendezvous; None until its address is known."""
        self._agents = agents
        self._description = description
        self._hosts = hosts
        self._ssh = ssh
        self._srun = srun
        self._interfaces = interfaces
        self._own_interface = own_interface
        self._began = began
        self._seconds = seconds
        self._on_rendezvous = on_rendezvous
        self._secret = secrets.token_bytes(32)
        self._check: NetworkCheck | None = None  # None: not begun, or all ranks are on this host

    def begin(self) -> None:
        """Start the agents, and then the ranks or, with other hosts, the network check.

        Errors: LostError, StartError."""
        if self._description.is_local:
            self._listen(StoreServer(self._secret))
        step: SlurmStep | None = None
        if self._srun is not None and not self._description.is_local:
            addresses = candidates(self._hosts, self._interfaces)
            step = SlurmStep(self._srun, self._secret, addresses)
        limit = min(_CONNECT_SECONDS, self._seconds * 2 / 3)
        self._agents.start(self._hosts, self._ssh, limit, step)
        if self.server is not None:
            self._start_ranks()
            return
        self._check = NetworkCheck(
            self._agents.all, self._secret, self._interfaces, self._began, self._seconds
        )
        for connection in self._agents.all:
            connection.send(agent.PROBE, self._description.check(connection))
            connection.send(agent.PROBE_INPUT, self._check.question())

    @property
    def due(self) -> float | None:
        """When to call :meth:`advance` again (``time.monotonic()``); None if nothing is left to do."""
        return self._check.due if self._check is not None and self.server is None else None

    def advance(self) -> None:
        """Do what is due: connect to further hosts, and continue the check. Errors: LostError, StartError."""
        if self._check is not None and self.server is None:
            self._agents.start_more()
            self._check.advance()
            self._start_ranks_if_ready()

    def feed(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe. Errors: StartError."""
        if self._check is not None and self.server is None:
            self._check.feed(connection, kind, payload)
            self._start_ranks_if_ready()

    def _start_ranks_if_ready(self) -> None:
        assert self._check is not None
        if self._check.done:
            self._listen(self._check.server())
            self._start_ranks()

    def _listen(self, server: StoreServer) -> None:
        self.server = server
        self._on_rendezvous(*server.address)

    def _start_ranks(self) -> None:
        assert self.server is not None
        self._description.serve(self.server.address[0], self._secret)
        for connection in self._agents.all:
            interface = self._check.interface(connection) if self._check else self._own_interface
            payload = self._description.ranks(
                connection, self.server.address, self._secret, interface
            )
            connection.send(agent.START, payload)

    def close(self) -> None:
        """Stop serving the rendezvous, and end the check."""
        if self._check is not None:
            self._check.close()
        if self.server is not None:
            self.server.close()


def prescribed_interface(hosts: Sequence[Placement], names: Sequence[str]) -> str | None:
    """The network interface on which ranks listen if all are on this host; None: any.

    ``names``: the interfaces that the user has named. Errors: ValueError if this host has none of them."""
    if names and all(host.is_local for host in hosts):
        return select_interfaces(names)[0].name
    return None
