"""A job of a fixed size: its ranks start together, and it ends when one of them fails or a host is lost.

With ranks on this host only, they start at once; with other hosts, after a check of the network."""

from __future__ import annotations

import time
from collections.abc import Sequence

from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.agent import agent
from horoplug.runner.ending.blame import describe, was_killed
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.network.network_check import NetworkCheck
from horoplug.runner.start.connection import AgentConnection

from .policy import Policy

_CONNECT_SECONDS = 10.0  # limit for ssh to connect, unless the start timeout is short


class StaticPolicy(Policy):
    """Runs the ranks of a job of a fixed size."""

    @property
    def members(self) -> Sequence[int]:
        return range(self._state.spec.size)

    # ---- the start ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the agents, and then the ranks or, with other hosts, the network check."""
        state, spec = self._state, self._state.spec
        server = StoreServer(state.secret) if spec.is_local else None
        if server is not None:
            state.listen(server)
        limit = min(_CONNECT_SECONDS, state.start_seconds * 2 / 3)
        state.agents.start(spec.hosts, None if spec.is_local else state.starter(limit))
        if server is not None:
            self._start_ranks()
            return
        self._check = NetworkCheck(
            *(spec.hosts, state.secret, state.interfaces, state.start_seconds),
            *(spec.terms, state.description.check),
            began=spec.began,
        )
        for connection in state.agents.all:
            self._check.add(connection)
        self._check_hosts(self._check, spec.began)

    @property
    def _checking(self) -> NetworkCheck | None:
        return self._check if self._state.server is None else None

    def _check_hosts(self, check: NetworkCheck, now: float) -> None:
        """Start the ranks if all hosts have passed the check."""
        if list(check.advance(now)):
            assert check.server is not None
            self._state.listen(check.server)
            self._start_ranks()

    def _start_ranks(self) -> None:
        state = self._state
        for connection in state.agents.all:
            interface = self._check.interface(connection) if self._check else state.own_interface
            connection.send(agent.START, state.description.ranks(connection.host, interface))

    # ---- the loop ----------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        times = [self._state.outcome.due]
        if self._checking is not None:
            times.append(self._checking.due)
        return min((due for due in times if due is not None), default=None)

    def advance(self, now: float) -> None:
        """Connect to further hosts, continue the check, and end the job because of the rank that has failed first."""
        outcome = self._state.outcome
        if self._checking is not None:
            self._state.agents.start_more()
            self._check_hosts(self._checking, now)
        if outcome.due is not None and now >= outcome.due:
            self._decide(now)

    def _decide(self, now: float) -> None:
        """End the job because of the rank that failed first or, if a host has become silent, because of that host,
        which is the likely cause."""
        state = self._state
        for connection in state.agents.open_remote:
            seconds = now - connection.heard
            if seconds > state.agents.quiet_seconds:
                cause = state.agents.cause_of_silence(connection, now)
                self.lost(cause, f"no sign of life for {seconds:.0f} s")
                return
        state.outcome.fail_first_rank(now)
        state.agents.send(agent.TERMINATE)

    # ---- events ------------------------------------------------------------------------------------------------------

    def rank_ended(self, connection: AgentConnection, rank: int, code: int) -> None:
        server = self._state.server
        assert server is not None
        text = f"rank {rank} {describe(code)}"
        self._state.console.say(text)
        # Waiting for this rank at the rendezvous is an error from now on.
        server.mark_lost(rank, text)
        self._state.outcome.rank_ended(
            rank,
            code,
            time.monotonic(),
            departures=server.departures(),
            present=server.present(),
            may_be_lost=connection.starter.ends_as_one and was_killed(code),
        )

    def not_started(self, connection: AgentConnection, rank: int, text: str) -> None:
        where = "" if self._state.spec.is_local else f" on {connection.host.name}"
        self._state.outcome.ranks_lost(connection.host.ranks)
        self._state.fail(f"rank {rank} could not be started{where}: {text}", 126, process=rank)

    def lost(self, connection: AgentConnection, why: str) -> None:
        self._state.lose(connection, why)


def prescribed_interface(hosts: Sequence[Placement], names: Sequence[str]) -> str | None:
    """The network interface on which ranks listen if all are on this host; None: any.

    ``names``: the interfaces that the user has named. Errors: ValueError if this host has none of them."""
    if names and all(host.is_local for host in hosts):
        return select_interfaces(names)[0].name
    return None
