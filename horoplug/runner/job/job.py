"""Runs one job: starts its ranks through agents, relays their output, and ends all ranks when one fails.

The agents (agent.py), one on each host, own the processes. The launcher exchanges frames with them over their stdin and
stdout, on this host or through ssh (start/connection.py). This is the loop; what is started when, and what follows when
a rank ends, is decided by a policy (policy.py). The decision about the end is in outcome.py, and all printing in
console.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from types import FrameType

from horoplug.base import config, descriptors
from horoplug.base.processes import become_subreaper, kill_descendants
from horoplug.rendezvous.network.libcrypto import libcrypto
from horoplug.runner.agent import agent
from horoplug.runner.ending.outcome import Outcome
from horoplug.runner.environment import common_environment, shares_threads
from horoplug.runner.network.preflight import StartError
from horoplug.runner.output.console import Console
from horoplug.runner.output.outlet import Outlets
from horoplug.runner.output.status import SECONDS, wanted
from horoplug.runner.start.agents import Agents
from horoplug.runner.start.connection import AgentConnection, LostError

from .description import JobDescription
from .policy import JobState, Policy
from .signals import signal_handlers
from .spec import JobSpec
from .standard_input import READER, StandardInput
from .static import StaticPolicy, prescribed_interface

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_CLOSE_SECONDS = 15.0  # limit for agents to end once the job has ended
_PING_SECONDS = 5.0  # longest interval of pings to other hosts
_LATER = 10.0  # seconds beyond the ranks' own timeout after which a host is lost: the ranks' error is the better one


class Job:
    """Runs one job, from its start to its exit code."""

    def __init__(
        self, spec: JobSpec, make_policy: Callable[[JobState], Policy] = StaticPolicy
    ) -> None:
        """Errors: ValueError for an invalid variable; OSError if the folder for the output cannot be created."""
        plain = common_environment(os.environ, spec.settings)
        if config.value("ENCRYPT", plain):
            libcrypto()  # the rendezvous has to encrypt, too
        named: str | None = config.value("GLOO_IFACE", plain)
        timeout: float = config.value("GLOO_TIMEOUT_SECONDS", plain)
        shares_threads(plain)
        start_seconds: float = config.value("START_TIMEOUT", plain)
        own_interface = prescribed_interface(spec.hosts, spec.interfaces)
        outlets = Outlets()
        shows_status = spec.status and wanted(os.environ, [w.terminal for w in outlets.writers])
        if shows_status:
            settings = dict(spec.settings) | {"STATUS_SECONDS": str(SECONDS)}
            spec = dataclasses.replace(spec, settings=settings)
        ping_seconds = min(timeout / 6, _PING_SECONDS)
        self._spec = spec
        self._agents = Agents(timeout + _LATER, ping_seconds, max(3 * ping_seconds, 2.0))
        self._console = Console(
            outlets,
            spec.size,
            folder=spec.folder,
            timestamps=spec.timestamps,
            verbose=spec.verbose,
            status=shows_status,
        )
        self._outcome = Outcome(spec.size, GRACE_SECONDS)
        self._description = JobDescription(spec, self._agents.lost_seconds, GRACE_SECONDS)
        self._state = JobState(
            spec,
            self._description,
            self._agents,
            self._outcome,
            self._console,
            start_seconds,
            interfaces=tuple(spec.interfaces) or tuple((named or "").replace(",", " ").split()),
            own_interface=own_interface,
        )
        self._policy = make_policy(self._state)
        self._has_started_directly = False
        self._input = StandardInput() if spec.given.is_read else None

    def run(self) -> int:
        """Start the ranks and wait until the last process of the job has ended. Returns the exit code."""
        become_subreaper()  # adopts the descendants of an agent that is killed
        descriptors.raise_limit()
        suspend = None if self._spec.is_local else self._on_suspension
        with self._policy.noticed(), signal_handlers(self._on_signal, suspend) as woken:
            try:
                self._begin()
                is_local = self._spec.is_local
                with contextlib.nullcontext() if is_local else self._agents.pinged():
                    self._loop(woken)
            except BrokenPipeError:
                self._outcome.output_closed()
            finally:
                self._end()
            self._report(woken)
        return self._outcome.code

    @property
    def members(self) -> Sequence[int]:
        """The numbers of the processes, by rank; of an elastic job, those of the current membership."""
        return self._policy.members

    @property
    def verdict(self) -> str:
        """One line that tells why the job has failed; empty if it has not."""
        return self._outcome.verdict

    @property
    def failed(self) -> int | None:
        """The rank, or the process of an elastic job, that has failed first; None: none has, or its host is lost."""
        return self._outcome.process

    # ---- start and loop ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._spec.is_local and (left_out := self._description.not_forwarded()):
            names = f"{self._spec.terms.forward}: {', '.join(left_out)}"
            self._console.say(f"not forwarded to other hosts without {names}")
        try:
            self._policy.begin()
        except (StartError, LostError) as error:
            self._state.fail(str(error))
        if self._outcome.is_ending:
            self._agents.send(agent.TERMINATE)  # a signal may have arrived before there were agents

    def _loop(self, woken: socket.socket) -> None:
        wakeups = [woken.fileno(), self._console.wakeup, *self._policy.wakeups]
        if self._input is not None:
            wakeups.append(self._input.wakeup)
        while self._agents.open or (self._policy.waits and not self._outcome.is_ending):
            for connection, is_stderr in self._agents.wait(wakeups, self._timeout()):
                if is_stderr:
                    self._read_stderr(connection)
                else:
                    self._read(connection)
            if command := self._console.check():
                self._agents.send(command)
            self._check_deadlines()

    def _timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        due = [self._outcome.deadline, self._console.due]
        ending = self._outcome.is_ending
        if not ending:
            due.append(self._policy.due)
        remote = self._agents.open_remote
        due += [self._agents.silent_at(connection, ending=ending) for connection in remote]
        known = [when for when in due if when is not None]
        return max(min(known) - time.monotonic(), 0) + 0.001 if known else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        started, ended = len(self._outcome.started), len(self._outcome.ended)
        self._console.show_status(now, self._state.server, started=started, ended=ended)
        silent = self._agents.silent(now, ending=self._outcome.is_ending)
        if self._outcome.is_ending:
            deadline = self._outcome.deadline
            is_late = deadline is not None and now > deadline
            for connection in list(self._agents.open) if is_late else silent:
                self._agents.drop(connection)
            return
        for each in silent:
            connection = self._agents.cause_of_silence(each, now)
            self._policy.lost(connection, f"no sign of life for {self._agents.lost_seconds:g} s")
        if not self._outcome.is_ending:
            try:
                self._policy.advance(now)
            except (StartError, LostError) as error:
                self._state.fail(str(error))

    # ---- frames of agents --------------------------------------------------------------------------------------------

    def _read(self, connection: AgentConnection) -> None:
        try:
            for kind, rank, payload in connection.receive():
                self._on_frame(connection, kind, rank, payload)
        except LostError as error:
            if connection.greeted or connection.parent is None or self._outcome.is_ending:
                self._policy.lost(connection, str(error))
            else:
                self._start_directly(connection, connection.parent, str(error))
        if connection.done:
            self._agents.finished(connection)
            self._policy.agent_ended(connection)

    def _start_directly(
        self, connection: AgentConnection, parent: AgentConnection, why: str
    ) -> None:
        """Start an agent by the launcher's own ssh, after the agent of another host has failed to start it."""
        if not self._has_started_directly:
            self._has_started_directly = True
            self._console.say(
                f"host {parent.host.name} cannot start the agent of host {connection.host.name} ({why}): "
                "this host starts such agents itself"
            )
        self._agents.start_directly(connection)

    def _read_tunnel(
        self, parent: AgentConnection, kind: bytes, number: int, payload: bytes
    ) -> None:
        """Handle a frame about the ssh process by which an agent has started another one."""
        connection = parent.feed_child(kind, number, payload)
        if connection in self._agents.open:
            self._read_stderr(connection)
            self._read(connection)

    def _read_stderr(self, connection: AgentConnection) -> None:
        text = connection.read_stderr()
        for line in text.splitlines():
            self._console.say(f"host {connection.host.name}: {line.strip()}")

    def _on_frame(
        self, connection: AgentConnection, kind: bytes, rank: int, payload: bytes
    ) -> None:
        where = "" if self._spec.is_local else f" on {connection.host.name}"
        if rank <= agent.FIRST_TUNNEL:
            self._read_tunnel(connection, kind, rank, payload)
        elif rank == agent.CHECK:
            self._on_probe(connection, kind, payload)
        elif kind in (agent.STDOUT, agent.STDERR):
            self._console.feed(rank, 0 if kind == agent.STDOUT else 1, payload)
        elif kind == agent.PID:
            self._outcome.started.add(rank)
            self._console.say(f"rank {rank} is pid {struct.unpack('!i', payload)[0]}{where}")
            self._begin_input(connection, rank)
        elif kind == agent.TAKEN and self._input is not None:
            self._input.taken(*agent.COUNT.unpack(payload))
        elif kind == agent.ENDED:
            self._policy.rank_ended(connection, rank, *struct.unpack("!i", payload))
        elif kind == agent.NOT_STARTED:
            self._policy.not_started(connection, rank, payload.decode(errors="replace"))

    def _begin_input(self, connection: AgentConnection, rank: int) -> None:
        """Read standard input for a rank that has started, if it is the one that gets it."""
        if self._input is not None and rank == READER:
            head = agent.NUMBER.pack(rank)
            self._input.begin(lambda data: connection.send(agent.RANK_INPUT, head + data))

    def _on_probe(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        if not self._outcome.is_ending:
            try:
                self._policy.probed(connection, kind, payload)
            except StartError as error:
                self._state.fail(str(error))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Sent from the signal handler, since the loop may be stuck writing a log to a slow disk.
        self._agents.send(self._outcome.interrupt(number, time.monotonic()))

    def _on_suspension(self, *_: object) -> None:
        """Ctrl-Z: tell other hosts not to take the silence for the launcher's end, then stop."""
        self._agents.announce_suspension()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _end(self) -> None:
        """End all processes of the job, whatever has happened."""
        self._policy.stop()
        if self._input is not None:
            self._input.close()
        self._agents.close(_CLOSE_SECONDS)
        kill_descendants()
        self._policy.close()

    def _report(self, woken: socket.socket) -> None:
        """Print the last line, and wait until all output is written; a further signal ends the wait."""
        signals = self._outcome.signals
        self._console.close(
            self._outcome.verdict if self._spec.serve is None else "",
            woken.fileno(),
            failed=self._outcome.is_ending,
            is_over=lambda: self._outcome.signals > signals,
        )
