"""Runs the ranks through agents, one per host: relays their output, ends all ranks when one fails, and reports why.

The launcher serves the rendezvous and decides; the agents (agent.py) own the processes. The launcher exchanges frames
with them over their stdin and stdout, on this host or through ssh (agent_connection.py)."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from horoplug.base import config, descriptors
from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.network.libcrypto import libcrypto
from horoplug.rendezvous.store.report import KEY, unpack
from horoplug.rendezvous.store.server import StoreServer

from . import agent
from .agent_connection import AgentConnection, LostError
from .agents import Agents
from .blame import Blame, describe
from .environment import common_environment
from .hosts import Placement
from .job_description import JobDescription
from .network_check import NetworkCheck
from .outlet import Outlets
from .output import RankOutput
from .preflight import StartError
from .remote import Ssh
from .signals import signal_handlers
from .status import SECONDS, Status, fit, in_foreground, wanted

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_PING_SECONDS = 5.0  # longest interval of pings to other hosts
_LATER = 10.0  # seconds beyond the ranks' own timeout after which a host is lost: the ranks' error is the better one
_STALLED_SECONDS = 10.0  # after a failure, limit for a reader of the output that accepts nothing
_NO_RANKS_SECONDS = 2.0  # limit for agents to end if no rank has started
_END_SECONDS = 12.0  # limit for an agent to end all processes, beyond the grace period


class Job:
    """Runs one job, from its start to its exit code."""

    def __init__(
        self,
        command: list[str],
        size: int,
        settings: Mapping[str, str],
        *,
        hosts: Sequence[Placement],
        began: float,
        ssh: Ssh | None = None,
        forward: Sequence[str] = (),
        interfaces: Sequence[str] = (),
        compat: bool = False,
        folder: Path | None = None,
        timestamps: bool = False,
        verbose: bool = False,
        status: bool = False,
        variables: Mapping[str, str] | None = None,
        serve: Callable[[str, bytes], Mapping[str, str]] | None = None,
    ) -> None:
        """``settings``: environment variables for the ranks, without prefix. ``hosts``: the hosts and their ranks.
        ``began``: the time from which the start timeout counts (``time.monotonic()``). ``ssh``: how to reach other
        hosts. ``forward``: names and patterns of further variables for them. ``interfaces``: names of the network
        interfaces to use; empty: they are found automatically.
        ``folder``: for the ranks' raw output. ``timestamps``: print the time before every line. ``status``: show a
        status line if the output is a terminal. ``variables``: environment variables for the ranks, by full name.
        ``serve``: called before the ranks start, with an address that all of them reach and the job's secret; returns
        further variables for them. With ``serve``, the caller reports the failure (:attr:`verdict`).

        Errors: ValueError for an invalid variable; OSError if the folder for the output cannot be created."""
        self._placements = hosts
        self._began = began
        self._ssh = ssh or Ssh()
        self._verbose = verbose
        self._is_reported_by_caller = serve is not None
        plain = common_environment(os.environ, settings)
        if config.value("ENCRYPT", plain):
            libcrypto()  # the store has to encrypt, too
        named: str | None = config.value("GLOO_IFACE", plain)
        self._interfaces = tuple(interfaces) or tuple((named or "").replace(",", " ").split())
        self._own_interface: str | None = None
        if interfaces and all(host.is_local for host in hosts):
            self._own_interface = select_interfaces(interfaces)[0].name
        self._start_seconds: float = config.value("START_TIMEOUT", plain)
        timeout: float = config.value("GLOO_TIMEOUT_SECONDS", plain)
        ping_seconds = min(timeout / 6, _PING_SECONDS)
        self._agents = Agents(timeout + _LATER, ping_seconds, max(3 * ping_seconds, 2.0))
        self._outlets = Outlets()
        writers = self._outlets.writers
        self._output = RankOutput(size, writers, folder=folder, timestamps=timestamps)
        self._held = False  # the agents do not read the ranks' output for now
        self._status: Status | None = None
        if status and wanted(os.environ, [writer.terminal for writer in writers]):
            self._status = Status(size, time.monotonic())
            settings = dict(settings) | {"STATUS_SECONDS": str(SECONDS)}
        self._description = JobDescription(
            command,
            size,
            settings,
            hosts=hosts,
            python=self._ssh.python,
            silence=self._agents.lost_seconds,
            grace=GRACE_SECONDS,
            compat=compat,
            variables=variables,
            forward=forward,
            serve=serve,
        )
        self._started: set[int] = set()
        self._gone: set[int] = set()  # ranks whose process has ended
        self._secret = secrets.token_bytes(32)
        self._blame = Blame(range(size))
        self._cause: tuple[str, int] | None = None  # last line and exit code
        self._interrupts = 0
        self._end_by: float | None = None
        self._server: StoreServer | None = None  # None: its address is not chosen yet
        self._start: NetworkCheck | None = None  # the checks before the start; None with one host

    def run(self) -> int:
        """Start the ranks and wait until the last process of the job has ended. Returns the exit code."""
        agent.become_subreaper()  # adopts the descendants of an agent that is killed
        descriptors.raise_limit()
        suspend = None if self._description.is_local else self._on_suspension
        with signal_handlers(self._on_signal, suspend) as woken:
            try:
                self._begin()
                with self._agents.pinged():
                    self._loop(woken)
            except BrokenPipeError:
                # The reader of the output has ended, as in "horovodrun ... | head".
                self._cause = "", 128 + signal.SIGPIPE
            finally:
                self._end()
            return self._report(woken)

    @property
    def verdict(self) -> str:
        """One line that tells why the job has failed; empty if it has not."""
        return self._cause[0] if self._cause is not None else ""

    # ---- the start ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the agents and then the ranks or, with other hosts, the checks that precede them."""
        if self._description.is_local:
            self._server = StoreServer(self._secret)
            self._say(f"rendezvous on {self._server.address[0]}:{self._server.address[1]}")
        elif left_out := self._description.not_forwarded():
            self._say(f"not forwarded to other hosts without -x: {', '.join(left_out)}")
        connect_seconds = min(10.0, self._start_seconds * 2 / 3)
        try:
            self._agents.start(self._placements, self._ssh, connect_seconds)
            if self._server is not None:
                self._send_job()
                if self._is_ending:
                    self._command_agents(b"T")  # a signal arrived before there were agents
                return
            self._start = NetworkCheck(
                self._agents.all, self._secret, self._interfaces, self._began, self._start_seconds
            )
        except (StartError, LostError) as error:
            self._fail(str(error))
            return
        for connection in self._agents.all:
            connection.send(b"C", self._description.check(connection))
            connection.send(b"M", self._start.question())
        if self._is_ending:
            self._command_agents(b"T")

    def _send_job(self) -> None:
        """Start the ranks."""
        assert self._server is not None
        self._description.serve(self._server.address[0], self._secret)
        for connection in self._agents.all:
            interface = self._start.interface(connection) if self._start else self._own_interface
            payload = self._description.ranks(
                connection, self._server.address, self._secret, interface
            )
            connection.send(b"J", payload)

    def _start_if_ready(self) -> None:
        if self._start is not None and self._start.done:
            self._server = self._start.server()
            self._say(f"rendezvous on {self._server.address[0]}:{self._server.address[1]}")
            self._send_job()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self, woken: socket.socket) -> None:
        while self._agents.open:
            wakeups = woken.fileno(), self._outlets.wakeup
            for connection, is_stderr in self._agents.wait(wakeups, self._timeout()):
                if is_stderr:
                    self._read_stderr(connection)
                else:
                    self._read(connection)
            self._check_output()
            self._check_deadlines()

    def _check_output(self) -> None:
        """Report a stream that has failed, and let the ranks wait while the launcher's own output does."""
        for line in self._outlets.new_errors():
            self._output.notice(f"horovodrun: {line}")
        if self._outlets.congested != self._held:
            self._held = not self._held
            self._agents.send(b"W" if self._held else b"G")

    def _timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        due = [self._end_by]
        if self._status is not None:
            due.append(self._status.due)
        if not self._is_ending:
            due.append(self._blame.due)
            if self._start is not None and self._server is None:
                due.append(self._start.due)
        remote = self._agents.open_remote
        due += [self._agents.silent_at(connection, ending=self._is_ending) for connection in remote]
        known = [when for when in due if when is not None]
        return max(min(known) - time.monotonic(), 0) + 0.001 if known else None

    def _show_status(self, now: float) -> None:
        if self._status is None or now < self._status.due:
            return
        line = self._status.line(
            now,
            started=len(self._started),
            up=self._server.present() if self._server is not None else 0,
            ended=len(self._gone),
            counters=unpack(self._server.value(KEY)) if self._server is not None else None,
        )
        foreground = in_foreground(2)
        draw = foreground and not self._outlets.waiting  # a stopped terminal does not need it
        self._output.show_status(fit(line, 2) if foreground else "", draw=draw)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        self._show_status(now)
        silent = self._agents.silent(now, ending=self._is_ending)
        if self._is_ending:
            is_late = now > (self._end_by or math.inf)
            for connection in list(self._agents.open) if is_late else silent:
                self._agents.drop(connection)
            return
        if self._start is not None and self._server is None:
            try:
                self._agents.start_more()
                self._start.advance()
                self._start_if_ready()
            except (StartError, LostError) as error:
                self._fail(str(error))
        elif self._blame.due is not None and now >= self._blame.due:
            self._decide(now)
        for connection in silent:
            self._lost(connection, f"no sign of life for {self._agents.lost_seconds:g} s")

    # ---- frames of agents --------------------------------------------------------------------------------------------

    def _read(self, connection: AgentConnection) -> None:
        try:
            for kind, rank, payload in connection.receive():
                self._on_frame(connection, kind, rank, payload)
        except LostError as error:
            self._lost(connection, str(error))
        if connection.done:
            self._agents.open.discard(connection)

    def _read_stderr(self, connection: AgentConnection) -> None:
        text = connection.read_stderr()
        for line in text.splitlines():
            self._say(f"host {connection.host.name}: {line.strip()}")

    def _on_frame(
        self, connection: AgentConnection, kind: bytes, rank: int, payload: bytes
    ) -> None:
        if rank == agent.CHECK:
            self._on_check(connection, kind, payload)
        elif kind in (agent.STDOUT, agent.STDERR):
            self._output.feed(rank, 0 if kind == agent.STDOUT else 1, payload)
        elif kind == b"P":
            self._started.add(rank)
            where = "" if self._description.is_local else f" on {connection.host.name}"
            self._say(f"rank {rank} is pid {struct.unpack('!i', payload)[0]}{where}")
        elif kind == b"X":
            self._ended(rank, *struct.unpack("!i", payload))
        elif kind == b"E":
            where = "" if self._description.is_local else f" on {connection.host.name}"
            text = payload.decode(errors="replace")
            self._blame.lost(connection.host.ranks)
            self._fail(f"rank {rank} could not be started{where}: {text}", 126)

    def _on_check(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe."""
        if self._start is not None and self._server is None and not self._is_ending:
            try:
                self._start.feed(connection, kind, payload)
                self._start_if_ready()
            except StartError as error:
                self._fail(str(error))

    def _ended(self, rank: int, code: int) -> None:
        assert self._server is not None
        self._gone.add(rank)
        self._say(f"rank {rank} {describe(code)}")
        # Waiting for this rank at the rendezvous is an error from now on.
        self._server.mark_lost(rank, f"rank {rank} {describe(code)}")
        if self._is_ending:
            self._blame.lost([rank])
        else:
            self._blame.ended(
                rank,
                code,
                self._server.departures(),
                time.monotonic(),
                present=self._server.present(),
            )

    def _lost(self, connection: AgentConnection, why: str) -> None:
        """A host is lost. Processes on another host are ended by their agent, those on this host by :meth:`run`."""
        self._agents.drop(connection)
        self._blame.lost(connection.host.ranks)
        if self._server is not None:
            for rank in connection.host.ranks:
                self._server.mark_lost(
                    rank, f"rank {rank} is on {connection.host.name}, which is lost"
                )
        self._fail(
            why if connection.host.is_local else f"host {connection.host.name}: {why}",
            all_ranks=True,
        )

    # ---- the end -----------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._cause is not None

    def _decide(self, now: float) -> None:
        """The rank that failed first is known: end the others. If a host has become silent, that is the likely
        cause."""
        silent = {connection: now - connection.heard for connection in self._agents.open_remote}
        for connection, seconds in silent.items():
            if seconds > self._agents.quiet_seconds:
                self._lost(connection, f"no sign of life for {seconds:.0f} s")
                return
        code = self._blame.code
        self._fail(f"rank {self._blame.first} {describe(code)}", code if code >= 0 else 128 - code)

    def _fail(self, text: str, code: int = 1, *, all_ranks: bool = False) -> None:
        if self._cause is None:
            begun = self._server is not None
            others = "; the other ranks were ended" if self._blame.running and begun else ""
            self._cause = text + ("; all ranks were ended" if all_ranks and begun else others), code
        self._command_agents(b"T")

    def _command_agents(self, command: bytes) -> None:
        """Tell the agents to end all ranks: with a grace period (T) or at once (K)."""
        if self._end_by is None:
            seconds = _NO_RANKS_SECONDS if self._server is None else GRACE_SECONDS + _END_SECONDS
            self._end_by = time.monotonic() + seconds
        self._agents.send(command)

    # ---- signals -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._interrupts += 1
        if self._cause is None:
            name = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(
                signal.Signals(number), f"ended by {signal.Signals(number).name}"
            )
            self._cause = f"{name}; all ranks were ended", 128 + number
        # Sent from the signal handler, since the loop may be stuck writing a log to a slow disk.
        self._command_agents(b"T" if self._interrupts == 1 else b"K")

    def _on_suspension(self, *_: object) -> None:
        """Ctrl-Z: tell other hosts not to take the silence for the launcher's end, then stop."""
        self._agents.announce_suspension()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _end(self) -> None:
        """End all processes of the job, whatever has happened."""
        self._agents.close(15.0)
        agent.kill_descendants()
        if self._start is not None:
            self._start.close()
        if self._server is not None:
            self._server.close()

    def _report(self, woken: socket.socket) -> int:
        """Write the last line and all output that waits. Returns the exit code.

        After a failure, a reader that accepts nothing is given up; a signal ends the wait in any case."""
        patience = None if self._cause is None else _STALLED_SECONDS
        interrupts = self._interrupts
        with contextlib.suppress(BrokenPipeError):
            self._output.close()
            if self.verdict and not self._is_reported_by_caller:
                self._output.notice(f"horovodrun: {self.verdict}")
            while True:
                lost = self._outlets.flush(
                    woken.fileno(), patience, lambda: self._interrupts > interrupts
                )
                lines = self._outlets.new_errors()
                if lost or not lines:
                    break
                for line in lines:
                    self._output.notice(f"horovodrun: {line}")
            if lost:
                self._output.notice(
                    f"horovodrun: {lost} bytes of output were not accepted and are lost"
                )
                self._outlets.flush(woken.fileno(), 0.1, lambda: False)
        return self._cause[1] if self._cause is not None else 0

    def _say(self, text: str) -> None:
        if self._verbose:
            self._output.notice(f"horovodrun: {text}")
