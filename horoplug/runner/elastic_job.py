"""Runs an elastic job: starts processes on the hosts that there are, and replaces those that fail.

The decisions are in elastic/roster.py. The processes ask through the rendezvous's store to take part
(horoplug/rendezvous/elastic/messages.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import horoplug
from horoplug.base.errors import ProtocolError
from horoplug.base.host_updates import HostUpdateResult
from horoplug.rendezvous.elastic.messages import (
    FROM_PROCESSES,
    Checks,
    HostUpdate,
    Leaving,
    Mismatch,
    Pace,
    Ready,
    answer_key,
    pack_dismissal,
    pack_membership,
    pack_update,
    unpack_message,
    update_key,
)
from horoplug.rendezvous.elastic.stop_point import StopVote
from horoplug.rendezvous.store.server import StoreServer

from . import agent
from .agent_connection import AgentConnection, LostError
from .blame import describe
from .elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript, HostManager
from .elastic.inbox import DiscoveryThread, Inbox
from .elastic.roster import (
    ENDED_ON_NOTICE,
    Action,
    Dismiss,
    Finish,
    Form,
    Kill,
    Limits,
    Notify,
    Roster,
    Say,
    Start,
)
from .elastic.stragglers import Pacing, Stragglers
from .elastic.update import Update
from .hosts import Placement, is_this_host, lookup
from .job import Job
from .network_check import candidates
from .slurm_requeue import requeue
from .slurm_step import SlurmStep
from .startup import Startup

_CONNECT_SECONDS = 10.0  # limit for ssh to connect
_STEP_SECONDS = 5.0  # limit for a step of Slurm to end by itself
_NOTICE = object()  # an event: this process was told that the job has to end
_NO_UPDATE = HostUpdate(0.0, HostUpdateResult.no_update)


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

    def payload(self, connection: AgentConnection, start: Start, size: int) -> bytes:
        """The payload for the agent that starts a process. ``size``: the number of live processes."""
        assert self.server is not None
        names = self._interfaces
        remote = names[0] if names else None
        interface = self._own_interface if connection.host.is_local else remote
        return self._description.process(
            connection, self.server.address, self._secret, interface, start, size
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
        self._found = FixedHosts(slots)
        self._hosts = HostManager(self._found, cooldown_range)
        self._hosts.update_available_hosts()
        self._roster = Roster(self._hosts, limits, horoplug.__version__)
        self._inbox = Inbox()
        self._discovery = discovery
        self._search: DiscoveryThread | None = None
        self._pacing = pacing or Pacing()
        self._paces: tuple[int, Stragglers | None] = 0, None  # of a generation
        self._notice_signal = notice_signal
        self._requeues = requeues
        self._complained = ""
        self._update: Update | None = None
        self._unused_round = 0  # of the current membership, once its update is over
        self._ssh = ssh
        self._placements = {host.name: host for host in hosts}
        self._agents.may_grow = not is_local
        # By host, the agents that may start processes, and by process, the agents that run them.
        self._connections: dict[str, AgentConnection] = {}
        self._running: dict[int, AgentConnection] = {}

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the processes of the current membership, by rank."""
        return self._roster.members

    def run(self) -> int:
        number, before = self._notice_signal, None
        if number is not None and threading.current_thread() is threading.main_thread():
            before = signal.signal(number, lambda *_: self._inbox.put(_NOTICE))
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
        server.watch(FROM_PROCESSES, self._inbox.put)
        if self._discovery is not None:
            self._search = DiscoveryThread(self._discovery, self._inbox.put)
        self._advance()

    def _is_running(self) -> bool:
        waits = not self._outcome.is_ending and not self._roster.is_over
        return waits or super()._is_running()

    def _further_wakeups(self) -> tuple[int, ...]:
        return (self._inbox.fileno(),)

    def _timeout(self) -> float | None:
        timeout, now = super()._timeout(), time.monotonic()
        if self._outcome.is_ending:
            return timeout
        times = [self._roster.due(now), None if self._update is None else self._update.due]
        waits = [max(due - now, 0) + 0.001 for due in times if due is not None]
        if timeout is not None:
            waits.append(timeout)
        return min(waits, default=None)

    def _check_deadlines(self) -> None:
        super()._check_deadlines()
        for event in self._inbox.take():
            self._on_event(event)
        self._advance()

    def _on_event(self, event: object) -> None:
        if isinstance(event, bytes):
            with contextlib.suppress(ProtocolError):  # such a process waits in vain
                match message := unpack_message(event):
                    case Ready():
                        if message.process in self._roster.members:
                            self._end_update()
                        self._roster.ready(message, time.monotonic())
                    case Leaving():
                        self._roster.leaving(message.process)
                    case Mismatch():
                        self._roster.mismatch(message.process, message.reason)
                    case Pace():
                        self._on_pace(message)
                    case Checks():
                        if self._update is not None:
                            self._update.count(message)
        elif event is _NOTICE:
            self._roster.notice()
        elif isinstance(event, dict):
            self._found.set(event)
            self._hosts.update_available_hosts()
            for connection in list(self._connections.values()):
                self._release(connection)
            wrong = [] if event else ["it has found no hosts"]
            if isinstance(self._discovery, HostDiscoveryScript):
                wrong = self._discovery.complaints or wrong
            self._complain(f"host discovery: {wrong[0]}" if wrong else "")
        else:
            self._complain(f"host discovery: {event}")

    def _on_pace(self, pace: Pace) -> None:
        generation, paces = self._paces
        if paces is None or pace.generation != generation:
            return
        for slow in paces.report(pace.process, pace.elapsed, pace.active):
            is_replaced = 0 < self._pacing.replaced <= slow.factor and self._roster.replace(
                slow.process, str(slow)
            )
            if not is_replaced:
                rank = self._roster.members.index(slow.process)
                where = self._running[slow.process].host.name
                self._console.notice(
                    f"process {slow.process} (rank {rank}) on {where} is slow: {slow}"
                )

    def _complain(self, text: str) -> None:
        """Report a problem of the discovery once, until it changes. No text: there is none."""
        if text and text != self._complained:
            self._console.notice(text)
        self._complained = text

    # ---- actions -----------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        while not self._outcome.is_ending:
            actions = self._roster.advance(time.monotonic())
            for action in actions:
                self._do(action)
            if self._update is not None:
                self._update.advance()
            if self._start_agents() and not actions:
                return

    def _do(self, action: Action) -> None:
        server = self._startup.server
        assert server is not None
        match action:
            case Start():
                self._start(action)
            case Form(membership, attempts):
                paces = self._pacing.watch(membership.processes)
                self._paces = membership.generation, paces
                value = pack_membership(membership)
                for process, attempt in zip(membership.processes, attempts, strict=True):
                    server.set(answer_key(process, attempt), value)
            case Dismiss(process, attempt, reason, is_error):
                server.set(answer_key(process, attempt), pack_dismissal(reason, is_error=is_error))
            case Notify(generation, HostUpdateResult.no_update, ends=False):
                # The membership is over. Its members do not wait for this key any more, but the server does.
                server.set(update_key(generation, self._unused_round), pack_update(_NO_UPDATE))
                self._unused_round = 0
            case Notify(generation, change, ends):
                update = HostUpdate(time.time(), change, ends)
                vote = StopVote(self._roster.members, time.monotonic())
                self._update = Update(server, generation, update, vote)
            case Kill(process):
                self._kill(process)
            case Say(text):
                self._console.notice(text)
            case Finish(0, _):
                self._agents.send(agent.FINISH)
            case Finish(code, text):
                self._fail(text, code)

    def _end_update(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.end()
            self._unused_round = update.unused_round

    def _start(self, start: Start) -> None:
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
        payload = self._startup.payload(connection, start, len(self._running))
        connection.send(agent.START, payload)

    def _start_agents(self) -> bool:
        """Start the agents that are due. Returns whether all could be started."""
        if self._outcome.is_ending or self._roster.is_over:
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
        if (
            host not in self._hosts.current_hosts.host_slots
            and connection not in self._running.values()
        ):
            del self._connections[host]
            connection.send(agent.FINISH)

    def _kill(self, process: int) -> None:
        connection = self._running[process]
        if connection.greeted:
            connection.send(agent.KILL_RANK, agent.NUMBER.pack(process))
            return
        # The host has not answered yet, and may never. Nothing was started there.
        del self._running[process]
        self._roster.ended(process, -signal.SIGKILL, "was not started", time.monotonic())
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
        if connection.done and not self._outcome.is_ending and not self._roster.is_over:
            self._lost(connection, "the agent was terminated")

    def _on_rank_end(self, rank: int, code: int) -> None:
        text = describe(code)
        connection = self._running.pop(rank)
        self._console.say(f"process {rank} {text}")
        self._outcome.ended.add(rank)
        self._outcome.ranks_lost([rank])
        server = self._startup.server
        assert server is not None
        server.mark_lost(rank, f"process {rank} {text}")
        if rank in self._roster.members:
            self._end_update()
        self._roster.ended(rank, code, text, time.monotonic())
        self._release(connection)

    def _on_not_started(
        self, connection: AgentConnection, rank: int, text: str, where: str
    ) -> None:
        del self._running[rank]
        self._roster.ended(rank, 126, f"could not be started: {text}", time.monotonic())
        self._release(connection)

    def _lost(self, connection: AgentConnection, why: str) -> None:
        if self._outcome.is_ending:
            super()._lost(connection, why)
            return
        self._give_up(connection)
        if self._roster.is_over or self._connections.get(connection.host.name) is not connection:
            return  # nothing depends on this agent any more
        del self._connections[connection.host.name]
        server = self._startup.server
        assert server is not None
        name = connection.host.name
        self._outcome.ranks_lost(connection.ranks)
        self._end_update()
        for process in [each for each, its in self._running.items() if its is connection]:
            del self._running[process]
            server.mark_lost(process, f"process {process} is on {name}, which is lost")
        self._roster.host_lost(name, why, time.monotonic())

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._search is not None:
            self._search.close()
        super()._end()
        for connection in self._agents.all:
            if connection.step is not None:
                connection.step.end(_STEP_SECONDS)
        self._inbox.close()
        if self._outcome.code == ENDED_ON_NOTICE and self._requeues:
            self._console.notice(requeue(os.environ))
