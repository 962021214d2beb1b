"""Drives an elastic job: knows the hosts and the processes, and says which processes start and end.

The decisions are in roster.py. The processes ask through the rendezvous's store to take part
(horoplug/rendezvous/elastic/messages.py). What starts and ends them is behind :class:`Workers`: agents on hosts
(horoplug/runner/job/elastic.py), actors of Ray or tasks of Spark (horoplug/runner/elastic_worker_job.py)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Protocol

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
from horoplug.runner.ending.finish import Finish

from .discovery import DiscoveredHosts, FixedHosts, HostDiscovery, HostManager
from .inbox import DiscoveryThread, Inbox
from .roster import Action, Dismiss, Form, Kill, Limits, Notify, Roster, Say, Start
from .stragglers import Pacing, Stragglers
from .update import Update

_NO_UPDATE = HostUpdate(0.0, HostUpdateResult.no_update)


class Workers(Protocol):
    """Starts and ends the processes of an elastic job. :class:`ElasticDriver` calls these methods in its own thread,
    and must not be kept waiting. How a process or a host ends is reported to the driver."""

    def start(self, start: Start) -> None:
        """Start a process, soon. Its variables are those of :func:`horoplug.runner.environment.elastic_environment`."""

    def kill(self, process: int) -> None:
        """End a process that has not ended by itself, soon."""

    def hosts_changed(self) -> None:
        """The hosts were found again (:attr:`ElasticDriver.hosts`), and may be others than before."""

    def finish(self) -> None:
        """The job has ended without an error."""

    def fail(self, finish: Finish) -> None:
        """The job has failed: end all processes."""

    def say(self, text: str) -> None:
        """Show the user a line."""


class ElasticDriver:
    """Drives one elastic job. Not thread-safe, except for :attr:`inbox`."""

    def __init__(
        self,
        workers: Workers,
        limits: Limits,
        slots: Mapping[str, int],
        *,
        discovery: HostDiscovery | None = None,
        cooldown_range: tuple[float, float] | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        """``slots``: the slots of the hosts that are known from the beginning; ``discovery``: finds the hosts, again
        and again, while the job runs; None: they do not change. ``cooldown_range``: see
        :class:`.discovery.HostManager`. ``pacing``: what happens to slow processes; None: nothing."""
        self._workers = workers
        self._found = FixedHosts(slots)
        self._hosts = HostManager(self._found, cooldown_range)
        self._hosts.update_available_hosts()
        self._maximum = limits.maximum
        self._roster = Roster(self._hosts, limits, horoplug.__version__)
        self.inbox = Inbox()
        """Events of other threads. A callable without arguments is called by :meth:`handle_events`."""
        self._discovery = discovery
        self._search: DiscoveryThread | None = None
        self._pacing = pacing or Pacing()
        self._paces: tuple[int, Stragglers | None] = 0, None  # of a generation
        self._complained = ""
        self._update: Update | None = None
        self._unused_round = 0  # of the current membership, once its update is over
        self._server: StoreServer | None = None
        self.outcome: Finish | None = None
        """How the job has ended; None: it has not."""

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the processes of the current membership, by rank."""
        return self._roster.members

    @property
    def is_over(self) -> bool:
        """Whether the job has ended or failed."""
        return self._roster.is_over

    @property
    def hosts(self) -> DiscoveredHosts:
        """The hosts that may be used now."""
        return self._hosts.current_hosts

    def most_on(self, host: str) -> int:
        """The largest number of processes that a host may have, by the slots that are known now."""
        return max(min(self.hosts.host_slots.get(host, 1), self._maximum), 1)

    def listen(self, server: StoreServer) -> None:
        """Listen to the processes, before the first one runs. ``server``: of the rendezvous; it stays the caller's."""
        self._server = server
        server.watch(FROM_PROCESSES, self.inbox.put)

    def begin(self) -> None:
        """Search for hosts."""
        if self._discovery is not None:
            self._search = DiscoveryThread(self._discovery, self.inbox.put)

    def close(self) -> None:
        """Search for hosts no more, and take no more events. Idempotent."""
        if self._search is not None:
            self._search.close()
        self.inbox.close()

    # ---- events ------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        """When :meth:`advance` has to be called without an event, by ``time.monotonic()``."""
        times = [
            self._roster.due(time.monotonic()),
            None if self._update is None else self._update.due,
        ]
        return min((due for due in times if due is not None), default=None)

    def handle_events(self) -> None:
        """Handle the events in the inbox. :meth:`advance` follows."""
        for event in self.inbox.take():
            if isinstance(event, bytes):
                with contextlib.suppress(ProtocolError):  # such a process waits in vain
                    self._on_message(event)
            elif callable(event):
                event()
            elif isinstance(event, dict):
                self._on_hosts(event)
            else:
                self._complain(f"host discovery: {event}")

    def notice(self) -> None:
        """The job was told to end, at the next commit."""
        self._roster.notice()

    def ended(self, process: int, code: int, text: str) -> None:
        """A process has ended. ``code``: its exit code, negative for a signal; ``text``: how it has ended, after
        "process 3"."""
        if self._server is not None:
            self._server.mark_lost(process, f"process {process} {text}")
        if process in self._roster.members:
            self._end_update()
        self._roster.ended(process, code, text, time.monotonic())

    def not_started(self, process: int, code: int, text: str) -> None:
        """A process could not be started. The arguments are those of :meth:`ended`."""
        self._roster.ended(process, code, text, time.monotonic())

    def host_lost(self, host: str, why: str) -> None:
        """A host is lost, with its processes. ``why``: one line."""
        self._end_update()
        if self._server is not None:
            for process in self._roster.processes_on(host):
                self._server.mark_lost(process, f"process {process} is on {host}, which is lost")
        self._roster.host_lost(host, why, time.monotonic())

    def _on_message(self, event: bytes) -> None:
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

    def _on_hosts(self, hosts: Mapping[str, int]) -> None:
        self._found.set(hosts)
        self._hosts.update_available_hosts()
        self._workers.hosts_changed()
        wrong = [] if hosts else ["it has found no hosts"]
        if self._discovery is not None:
            wrong = self._discovery.complaints or wrong
        self._complain(f"host discovery: {wrong[0]}" if wrong else "")

    def _on_pace(self, pace: Pace) -> None:
        generation, paces = self._paces
        if paces is None or pace.generation != generation:
            return
        for slow in paces.report(pace.process, pace.elapsed, pace.active):
            member = self._roster.describe_member(slow.process)
            if member is None:
                continue  # it has ended since its last report
            is_replaced = 0 < self._pacing.replaced <= slow.factor and self._roster.replace(
                slow.process, str(slow)
            )
            if not is_replaced:
                self._workers.say(f"{member} is slow: {slow}")

    def _complain(self, text: str) -> None:
        """Report a problem of the discovery once, until it changes. No text: there is none."""
        if text and text != self._complained:
            self._workers.say(text)
        self._complained = text

    # ---- actions -----------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do what is to be done now. Returns whether that was something: more may follow at once."""
        actions = self._roster.advance(time.monotonic())
        for action in actions:
            self._do(action)
        if self._update is not None:
            self._update.advance()
        return bool(actions)

    def _do(self, action: Action) -> None:
        match action:
            case Start():
                self._workers.start(action)
            case Kill(process):
                self._workers.kill(process)
            case Say(text):
                self._workers.say(text)
            case Finish():
                self.outcome = action
                if action.code:
                    self._workers.fail(action)
                else:
                    self._workers.finish()
            case _:
                self._answer(action)

    def _answer(self, action: Form | Dismiss | Notify) -> None:
        """Tell processes what was decided. There are some, so that there is a server."""
        server = self._server
        assert server is not None
        match action:
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

    def _end_update(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.end()
            self._unused_round = update.unused_round
