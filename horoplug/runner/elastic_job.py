"""Runs an elastic job by agents: starts processes on the hosts that there are, and replaces those that fail.

What happens when is decided in elastic/driver.py and elastic/roster.py. This module has the agents do it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from horoplug.rendezvous.store.server import StoreServer

from . import agent
from .agent_connection import AgentConnection, LostError
from .blame import describe
from .elastic.discovery import HostDiscovery
from .elastic.driver import ElasticDriver
from .elastic.roster import ENDED_ON_NOTICE, Limits, Start
from .elastic.stragglers import Pacing
from .finish import Finish
from .hosts import Placement, is_this_host, lookup
from .job import Job
from .network_check import candidates
from .slurm_requeue import requeue
from .slurm_step import SlurmStep
from .startup import Startup

_CONNECT_SECONDS = 10.0  # limit for ssh to connect
_STEP_SECONDS = 5.0  # limit for a step of Slurm to end by itself


class _ElasticStartup(Startup):
    """Serves the rendezvous. The roster decides which agents and processes are started, and when."""

    def begin(self) -> None:
        """Listen, on an address that other hosts reach if the job may have any. Errors: StartError."""
        if self._description.is_local:
            self._listen(StoreServer(self._secret))
        else:
            address = candidates(self._hosts, self._interfaces)[0]
            self._listen(StoreServer(self._secret, address))
        assert self.server is not None
        self._description.serve(self.server.address[0], self._secret)

    @property
    def due(self) -> None:
        return None

    def step(self) -> SlurmStep | None:
        """A step of Slurm for the agent of one more host, so that hosts are lost one by one; None: ssh starts it."""
        if self._srun is None:
            return None
        return SlurmStep(self._srun, self._secret, candidates(self._hosts, self._interfaces))

    def payload(self, connection: AgentConnection, start: Start, size: int, most: int) -> bytes:
        """The payload for the agent that starts a process. ``size``: the number of live processes; ``most``: of those
        that the host may have."""
        assert self.server is not None
        names = self._interfaces
        remote = names[0] if names else None
        interface = self._own_interface if connection.host.is_local else remote
        return self._description.process(
            connection, self.server.address, self._secret, interface, start, size, most
        )


class ElasticJob(Job):
    """Runs one elastic job, from its start to its exit code."""

    _startup_class = _ElasticStartup
    _startup: _ElasticStartup

    def __init__(
        self,
        command: list[str],
        limits: Limits,
        *,
        hosts: list[Placement],
        slots: dict[str, int],
        discovery: HostDiscovery | None = None,
        cooldown_range: tuple[float, float] | None = None,
        pacing: Pacing | None = None,
        notice_signal: int | None = None,
        requeues: bool = False,
        ssh: Any = None,
        **kwargs: Any,
    ) -> None:
        """``hosts``, ``slots``: the hosts that are known from the beginning, and the slots of each; ``discovery``:
        finds the hosts, again and again, while the job runs; None: they do not change. ``cooldown_range``: see
        :class:`.elastic.discovery.HostManager`. ``pacing``: what happens to slow processes; None:
        nothing. ``notice_signal``: the signal by which this process is told that the job has to end; ``requeues``:
        whether Slurm is then asked to run it again. The other arguments are those of :class:`.job.Job`."""
        is_local = discovery is None and all(host.is_local for host in hosts)
        size = min(limits.maximum, max(sum(slots.values()), 1))
        super().__init__(command, size, hosts=hosts, ssh=ssh, is_local=is_local, **kwargs)
        self._driver = ElasticDriver(
            self,
            limits,
            slots,
            discovery=discovery,
            cooldown_range=cooldown_range,
            pacing=pacing,
        )
        self._notice_signal = notice_signal
        self._requeues = requeues
        self._ssh = ssh
        self._placements = {host.name: host for host in hosts}
        self._agents.may_grow = not is_local
        # By host, the agents that may start processes, and by process, the agents that run them.
        self._connections: dict[str, AgentConnection] = {}
        self._running: dict[int, AgentConnection] = {}

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the processes of the current membership, by rank."""
        return self._driver.members

    def run(self) -> int:
        number, before = self._notice_signal, None
        if number is not None and threading.current_thread() is threading.main_thread():
            before = signal.signal(number, lambda *_: self._driver.inbox.put(self._driver.notice))
        try:
            return super().run()
        finally:
            if before is not None and number is not None:
                signal.signal(number, before)

    # ---- start and loop ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        super()._begin()
        if self._outcome.is_ending:
            return
        server = self._startup.server
        assert server is not None
        self._driver.begin(server)
        self._advance()

    def _is_running(self) -> bool:
        waits = not self._outcome.is_ending and not self._driver.is_over
        return waits or super()._is_running()

    def _further_wakeups(self) -> tuple[int, ...]:
        return (self._driver.inbox.fileno(),)

    def _timeout(self) -> float | None:
        timeout, due = super()._timeout(), self._driver.due
        if self._outcome.is_ending or due is None:
            return timeout
        wait = max(due - time.monotonic(), 0) + 0.001
        return wait if timeout is None else min(wait, timeout)

    def _check_deadlines(self) -> None:
        super()._check_deadlines()
        self._driver.handle_events()
        self._advance()

    def _advance(self) -> None:
        while not self._outcome.is_ending:
            has_acted = self._driver.advance()
            if self._start_agents() and not has_acted:
                return

    # ---- what the driver has done ------------------------------------------------------------------------------------

    def hosts_changed(self) -> None:
        for connection in list(self._connections.values()):
            self._release(connection)

    def finish(self) -> None:
        self._agents.send(agent.FINISH)

    def fail(self, finish: Finish) -> None:
        self._fail(finish.text(self._terms), finish.code, process=finish.process)

    def say(self, text: str) -> None:
        self._console.notice(text)

    def start(self, start: Start) -> None:
        host = self._placements.get(start.host)
        if host is None:
            addresses = lookup([start.host])[start.host]
            host = Placement(start.host, is_this_host(start.host, addresses), (), tuple(addresses))
            self._placements[start.host] = host
        connection = self._connections.get(start.host)
        if connection is None:
            host = Placement(host.name, host.is_local, (), host.addresses)
            step = None if host.is_local else self._startup.step()
            connection = AgentConnection(host, self._ssh, _CONNECT_SECONDS, step=step)
            self._connections[start.host] = connection
            self._agents.all.append(connection)
        self._running[start.process] = connection
        connection.ranks.add(start.process)
        self._console.add(start.process)
        most = self._driver.most_on(start.host)
        payload = self._startup.payload(connection, start, len(self._running), most)
        connection.send(agent.START, payload)

    def _start_agents(self) -> bool:
        """Start the agents that are due. Returns whether all could be started."""
        if self._outcome.is_ending or self._driver.is_over:
            return True
        lost = False
        for connection in self._agents.due():
            try:
                if connection.step is not None:
                    connection.step.start()
                connection.start()
                self._agents.open.add(connection)
            except OSError as error:
                lost = True
                self._lost(connection, f"srun cannot be run: {error.strerror}")
            except LostError as error:
                lost = True
                self._lost(connection, str(error))
        return not lost

    def _release(self, connection: AgentConnection) -> None:
        """Let the agent of a host that the job may not use any more end, if it has no processes. The host may now
        vanish without being lost."""
        host = connection.host.name
        if host not in self._driver.hosts.host_slots and connection not in self._running.values():
            del self._connections[host]
            connection.send(agent.FINISH)

    def kill(self, process: int) -> None:
        connection = self._running[process]
        connection.send(agent.KILL_RANK, agent.NUMBER.pack(process))
        if connection.greeted:
            return
        # The host has not answered yet, and may never. If it does, its agent starts the process and ends it.
        del self._running[process]
        self._driver.not_started(process, -signal.SIGKILL, "was not started")
        if connection not in self._running.values():
            del self._connections[connection.host.name]
            self._give_up(connection)

    def _give_up(self, connection: AgentConnection) -> None:
        """Stop waiting for an agent, and end its step in a thread: srun may wait for a node that does not answer."""
        self._agents.drop(connection)
        self._agents.all.remove(connection)
        if connection.step is not None:
            threading.Thread(target=connection.step.end, args=(0.0,), daemon=True).start()

    # ---- frames of agents --------------------------------------------------------------------------------------------

    def _read(self, connection: AgentConnection) -> None:
        super()._read(connection)
        if connection.done and not self._outcome.is_ending and not self._driver.is_over:
            self._lost(connection, "the agent was terminated")

    def _on_rank_end(self, connection: AgentConnection, rank: int, code: int) -> None:
        if self._running.pop(rank, None) is None:
            return  # it was given up before its agent has answered
        text = describe(code)
        self._console.say(f"process {rank} {text}")
        self._outcome.ended.add(rank)
        self._outcome.ranks_lost([rank])
        self._driver.ended(rank, code, text)
        self._release(connection)

    def _on_not_started(
        self, connection: AgentConnection, rank: int, text: str, where: str
    ) -> None:
        if self._running.pop(rank, None) is None:
            return
        self._driver.not_started(rank, 126, f"could not be started: {text}")
        self._release(connection)

    def _lost(self, connection: AgentConnection, why: str) -> None:
        if self._outcome.is_ending:
            super()._lost(connection, why)
            return
        self._give_up(connection)
        if self._driver.is_over or self._connections.get(connection.host.name) is not connection:
            return  # nothing depends on this agent any more
        del self._connections[connection.host.name]
        self._outcome.ranks_lost(connection.ranks)
        for process in [each for each, its in self._running.items() if its is connection]:
            del self._running[process]
        self._driver.host_lost(connection.host.name, why)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._driver.close()
        super()._end()
        for connection in self._agents.all:
            if connection.step is not None:
                connection.step.end(_STEP_SECONDS)
        if self._outcome.code == ENDED_ON_NOTICE and self._requeues:
            self._console.notice(requeue(os.environ))
