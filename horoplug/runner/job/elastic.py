"""An elastic job whose processes agents run: starts them on the hosts that there are, and replaces those that fail.

What happens when is decided in elastic/driver.py and elastic/roster.py. This module has the agents do it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.agent import agent
from horoplug.runner.elastic.discovery import HostDiscovery
from horoplug.runner.elastic.driver import ElasticDriver
from horoplug.runner.elastic.roster import ENDED_ON_NOTICE, Limits, Start
from horoplug.runner.elastic.stragglers import Pacing
from horoplug.runner.ending.blame import describe
from horoplug.runner.ending.finish import Finish
from horoplug.runner.hosts.hosts import Placement, is_this_host, lookup
from horoplug.runner.network.network_check import NetworkCheck
from horoplug.runner.start.connection import AgentConnection, LostError
from horoplug.runner.start.slurm_requeue import requeue

from .policy import JobState, Policy

_CONNECT_SECONDS = 10.0  # limit for ssh to connect


class ElasticPolicy(Policy):
    """Runs the processes of an elastic job. Implements :class:`.elastic.driver.Workers`."""

    def __init__(
        self,
        state: JobState,
        limits: Limits,
        slots: Mapping[str, int],
        *,
        discovery: HostDiscovery | None = None,
        cooldown_range: tuple[float, float] | None = None,
        pacing: Pacing | None = None,
        notice_signal: int | None = None,
        requeues: bool = False,
    ) -> None:
        """``notice_signal``: the signal by which this process is told that the job has to end; ``requeues``: whether
        Slurm is then asked to run it again. The other arguments are those of :class:`.elastic.driver.ElasticDriver`."""
        super().__init__(state)
        self._driver = ElasticDriver(
            self, limits, slots, discovery=discovery, cooldown_range=cooldown_range, pacing=pacing
        )
        self.wakeups = (self._driver.inbox.fileno(),)
        self._notice_signal = notice_signal
        self._requeues = requeues
        self._agents = state.agents
        self._placements = {host.name: host for host in state.spec.hosts}
        # By host, the agents that may start processes, and by process, the agents that run them.
        self._connections: dict[str, AgentConnection] = {}
        self._running: dict[int, AgentConnection] = {}
        self._held: dict[int, Start] = {}  # processes on hosts that are being checked

    @property
    def members(self) -> Sequence[int]:
        """The processes of the current membership."""
        return self._driver.members

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        number, before = self._notice_signal, None
        if number is not None and threading.current_thread() is threading.main_thread():
            before = signal.signal(number, lambda *_: self._driver.inbox.put(self._driver.notice))
        try:
            yield
        finally:
            if before is not None and number is not None:
                signal.signal(number, before)

    # ---- start and loop ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Search for hosts. If the job may have other ones than this, they are checked before processes start there."""
        state, spec = self._state, self._state.spec
        if spec.is_local:
            self._listen(StoreServer(state.secret))
        else:
            self._check = NetworkCheck(
                *(spec.hosts, state.secret, state.interfaces, state.start_seconds),
                *(spec.terms, state.description.check),
            )
        self._driver.begin()
        self._advance()

    def _listen(self, server: StoreServer) -> None:
        self._state.listen(server)
        self._driver.listen(server)

    @property
    def waits(self) -> bool:
        return not self._driver.is_over

    @property
    def due(self) -> float | None:
        times = [self._driver.due, None if self._check is None else self._check.due]
        return min((due for due in times if due is not None), default=None)

    def advance(self, now: float) -> None:
        self._driver.handle_events()
        self._advance()

    def _advance(self) -> None:
        while not self._state.outcome.is_ending:
            has_acted = self._driver.advance()
            has_acted |= self._check_hosts()
            if self._start_agents() and not has_acted:
                return

    def _check_hosts(self) -> bool:
        """Start the processes of hosts that have passed the check, and leave out those that have failed. Returns
        whether there were any."""
        check = self._check
        if check is None or self._driver.is_over:
            return False
        results = list(check.advance(time.monotonic()))
        if self._state.server is None and check.server is not None:
            self._listen(check.server)
        for connection, problem in results:
            if problem:
                self.lost(connection, problem)
                continue
            starts = [
                each for each in self._held.values() if self._running[each.process] is connection
            ]
            for start in starts:
                del self._held[start.process]
                self._send(connection, start)
        return bool(results)

    # ---- what the driver has done ------------------------------------------------------------------------------------

    def hosts_changed(self) -> None:
        for connection in list(self._connections.values()):
            self._release(connection)

    def finish(self) -> None:
        self._agents.send(agent.FINISH)

    def fail(self, finish: Finish) -> None:
        text = finish.text(self._state.spec.terms)
        self._state.fail(text, finish.code, process=finish.process)

    def say(self, text: str) -> None:
        self._state.console.notice(text)

    def start(self, start: Start) -> None:
        connection = self._connections.get(start.host)
        if connection is None:
            host = self._placement(start.host)
            # One for each host, so that hosts are lost one by one.
            starter = None if host.is_local else self._state.starter(_CONNECT_SECONDS)
            connection = self._agents.add(host, starter)
            self._connections[start.host] = connection
            if self._check is not None:
                self._check.add(connection)
        self._running[start.process] = connection
        connection.ranks.add(start.process)
        self._state.console.add(start.process)
        if self._check is None or self._check.is_member(connection):
            self._send(connection, start)
        else:
            self._held[start.process] = start

    def _send(self, connection: AgentConnection, start: Start) -> None:
        check, own = self._check, self._state.own_interface
        interface = own if check is None else check.interface(connection)
        size, most = len(self._running), self._driver.most_on(start.host)
        host, describe = connection.host, self._state.description.process
        connection.send(agent.START, describe(host, interface, start, size, most))

    def _placement(self, name: str) -> Placement:
        host = self._placements.get(name)
        if host is None:
            addresses = lookup([name])[name]
            host = Placement(name, is_this_host(name, addresses), (), tuple(addresses))
            self._placements[name] = host
        return Placement(host.name, host.is_local, (), host.addresses)

    def _start_agents(self) -> bool:
        """Start the agents that are due. Returns whether all could be started."""
        if self._state.outcome.is_ending or self._driver.is_over:
            return True
        lost = False
        for connection in self._agents.due():
            try:
                self._agents.start_one(connection)
            except LostError as error:
                lost = True
                self.lost(connection, str(error))
        return not lost

    def _release(self, connection: AgentConnection) -> None:
        """Let the agent of a host that the job may not use any more end, if it has no processes. The host may now
        vanish without being lost."""
        host = connection.host.name
        if host not in self._driver.hosts.host_slots and connection not in self._running.values():
            self._forget(connection)
            connection.send(agent.FINISH)

    def _forget(self, connection: AgentConnection) -> None:
        """Start no further processes on a host by this agent."""
        del self._connections[connection.host.name]
        if self._check is not None:
            self._check.drop(connection)

    def kill(self, process: int) -> None:
        connection = self._running[process]
        is_held = self._held.pop(process, None) is not None
        if not is_held:
            connection.send(agent.KILL_RANK, agent.NUMBER.pack(process))
            if connection.greeted:
                return
        # The host has not answered yet, and may never. If it does, its agent starts the process and ends it.
        del self._running[process]
        self._driver.not_started(process, -signal.SIGKILL, "was not started")
        if connection not in self._running.values():
            self._forget(connection)
            self._agents.give_up(connection)

    # ---- frames of agents --------------------------------------------------------------------------------------------

    def agent_ended(self, connection: AgentConnection) -> None:
        if not self._state.outcome.is_ending and not self._driver.is_over:
            self.lost(connection, "the agent was terminated")

    def rank_ended(self, connection: AgentConnection, rank: int, code: int) -> None:
        if self._running.pop(rank, None) is None:
            return  # it was given up before its agent has answered
        text = describe(code)
        self._state.console.say(f"process {rank} {text}")
        self._state.outcome.ended.add(rank)
        self._state.outcome.ranks_lost([rank])
        self._driver.ended(rank, code, text)
        self._release(connection)

    def not_started(self, connection: AgentConnection, rank: int, text: str) -> None:
        if self._running.pop(rank, None) is None:
            return
        self._driver.not_started(rank, 126, f"could not be started: {text}")
        self._release(connection)

    def lost(self, connection: AgentConnection, why: str) -> None:
        if self._state.outcome.is_ending:
            self._state.lose(connection, why)
            return
        self._agents.give_up(connection)
        if self._driver.is_over or self._connections.get(connection.host.name) is not connection:
            return  # nothing depends on this agent any more
        self._forget(connection)
        self._state.outcome.ranks_lost(connection.ranks)
        for process in [each for each, its in self._running.items() if its is connection]:
            del self._running[process]
            self._held.pop(process, None)
        self._driver.host_lost(connection.host.name, why)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._driver.close()

    def close(self) -> None:
        super().close()
        if self._state.outcome.code == ENDED_ON_NOTICE and self._requeues:
            self.say(requeue(os.environ))
