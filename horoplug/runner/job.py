"""Runs one job: starts its ranks through agents, relays their output, and ends all ranks when one fails.

The agents (agent.py), one on each host, own the processes. The launcher exchanges frames with them over their stdin and
stdout, on this host or through ssh (agent_connection.py). The start is in startup.py, the decision about the end in
outcome.py, and all printing in console.py."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from horoplug.base import config, descriptors
from horoplug.rendezvous.network.libcrypto import libcrypto

from . import agent
from .agent_connection import AgentConnection, LostError
from .agents import Agents
from .blame import describe, was_killed
from .console import Console
from .environment import common_environment, shares_threads
from .finish import COMMAND_LINE, Terms
from .hosts import Placement
from .job_description import JobDescription
from .outcome import Outcome
from .outlet import Outlets
from .preflight import StartError
from .remote import Ssh
from .signals import signal_handlers
from .srun import Srun
from .standard_input import NO_INPUT, READER, Input, StandardInput
from .startup import Startup, prescribed_interface
from .status import SECONDS, wanted

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_CLOSE_SECONDS = 15.0  # limit for agents to end once the job has ended
_PING_SECONDS = 5.0  # longest interval of pings to other hosts
_LATER = 10.0  # seconds beyond the ranks' own timeout after which a host is lost: the ranks' error is the better one


class Job:
    """Runs one job, from its start to its exit code."""

    _startup_class: type[Startup] = Startup

    def __init__(
        self,
        command: list[str],
        size: int,
        settings: Mapping[str, str],
        *,
        hosts: Sequence[Placement],
        began: float,
        ssh: Ssh | None = None,
        srun: Srun | None = None,
        forward: Sequence[str] = (),
        interfaces: Sequence[str] = (),
        compat: bool = False,
        folder: Path | None = None,
        timestamps: bool = False,
        verbose: bool = False,
        status: bool = False,
        variables: Mapping[str, str] | None = None,
        serve: Callable[[str, bytes], Mapping[str, str]] | None = None,
        is_local: bool | None = None,
        given: Input = NO_INPUT,
        terms: Terms = COMMAND_LINE,
    ) -> None:
        """``settings``: environment variables for the ranks, without prefix. ``hosts``: the hosts and their ranks.
        ``began``: the time from which the start timeout counts (``time.monotonic()``). ``ssh``: how to reach other
        hosts. ``srun``: starts the agents of other hosts instead of ssh. ``forward``: names and patterns of further
        variables for them. ``interfaces``: names of the network interfaces to use; empty: they are found
        automatically.
        ``folder``: for the ranks' raw output. ``timestamps``: print the time before every line. ``status``: show a
        status line if the output is a terminal. ``variables``: environment variables for the ranks, by full name.
        ``serve``: called before the ranks start, with an address that all of them reach and the job's secret; returns
        further variables for them. With ``serve``, the caller reports the failure (:attr:`verdict`).
        ``is_local``: whether all ranks are on this host, by default found from ``hosts``. ``given``: what the ranks
        read from their standard input. ``terms``: those of the caller, for :attr:`verdict`.

        Errors: ValueError for an invalid variable; OSError if the folder for the output cannot be created."""
        plain = common_environment(os.environ, settings)
        if config.value("ENCRYPT", plain):
            libcrypto()  # the rendezvous has to encrypt, too
        named: str | None = config.value("GLOO_IFACE", plain)
        timeout: float = config.value("GLOO_TIMEOUT_SECONDS", plain)
        shares_threads(plain)
        start_seconds: float = config.value("START_TIMEOUT", plain)
        own_interface = prescribed_interface(hosts, interfaces)
        outlets = Outlets()
        shows_status = status and wanted(os.environ, [w.terminal for w in outlets.writers])
        if shows_status:
            settings = dict(settings) | {"STATUS_SECONDS": str(SECONDS)}
        ping_seconds = min(timeout / 6, _PING_SECONDS)
        self._agents = Agents(timeout + _LATER, ping_seconds, max(3 * ping_seconds, 2.0))
        ssh = ssh or Ssh()
        self._description = JobDescription(
            command,
            size,
            settings,
            hosts=hosts,
            python=ssh.python,
            silence=self._agents.lost_seconds,
            grace=GRACE_SECONDS,
            compat=compat,
            variables=variables,
            forward=forward,
            serve=serve,
            is_local=is_local,
            given=given,
        )
        self._startup = self._startup_class(
            self._agents,
            self._description,
            hosts,
            ssh,
            interfaces=tuple(interfaces) or tuple((named or "").replace(",", " ").split()),
            own_interface=own_interface,
            began=began,
            seconds=start_seconds,
            on_rendezvous=self._on_rendezvous,
            srun=srun,
        )
        self._console = Console(
            outlets,
            size,
            folder=folder,
            timestamps=timestamps,
            verbose=verbose,
            status=shows_status,
        )
        self._outcome = Outcome(size, GRACE_SECONDS)
        self._terms = terms
        self._is_reported_by_caller = serve is not None
        self._has_started_directly = False
        self._input = StandardInput() if given.is_read else None

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
                self._outcome.output_closed()
            finally:
                self._end()
            self._report(woken)
        return self._outcome.code

    @property
    def verdict(self) -> str:
        """One line that tells why the job has failed; empty if it has not."""
        return self._outcome.verdict

    @property
    def failed(self) -> int | None:
        """The rank, or the process of an elastic job, that has failed first; see :attr:`.outcome.Outcome.process`."""
        return self._outcome.process

    # ---- start and loop ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._description.is_local and (left_out := self._description.not_forwarded()):
            self._console.say(f"not forwarded to other hosts without -x: {', '.join(left_out)}")
        try:
            self._startup.begin()
        except (StartError, LostError) as error:
            self._fail(str(error))
        if self._outcome.is_ending:
            self._agents.send(agent.TERMINATE)  # a signal may have arrived before there were agents

    def _on_rendezvous(self, address: str, port: int) -> None:
        self._outcome.ranks_can_run()
        self._console.say(f"rendezvous on {address}:{port}")

    def _loop(self, woken: socket.socket) -> None:
        while self._is_running():
            wakeups = [woken.fileno(), self._console.wakeup, *self._further_wakeups()]
            if self._input is not None:
                wakeups.append(self._input.wakeup)
            for connection, is_stderr in self._agents.wait(wakeups, self._timeout()):
                if is_stderr:
                    self._read_stderr(connection)
                else:
                    self._read(connection)
            if command := self._console.check():
                self._agents.send(command)
            self._check_deadlines()

    def _is_running(self) -> bool:
        return bool(self._agents.open)

    def _further_wakeups(self) -> tuple[int, ...]:
        """Nonblocking descriptors that end the wait of the loop."""
        return ()

    def _timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        due = [self._outcome.deadline, self._console.due]
        ending = self._outcome.is_ending
        if not ending:
            due += [self._outcome.due, self._startup.due]
        remote = self._agents.open_remote
        due += [self._agents.silent_at(connection, ending=ending) for connection in remote]
        known = [when for when in due if when is not None]
        return max(min(known) - time.monotonic(), 0) + 0.001 if known else None

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        started, ended = len(self._outcome.started), len(self._outcome.ended)
        self._console.show_status(now, self._startup.server, started=started, ended=ended)
        silent = self._agents.silent(now, ending=self._outcome.is_ending)
        if self._outcome.is_ending:
            deadline = self._outcome.deadline
            is_late = deadline is not None and now > deadline
            for connection in list(self._agents.open) if is_late else silent:
                self._agents.drop(connection)
            return
        try:
            self._startup.advance()
        except (StartError, LostError) as error:
            self._fail(str(error))
        if self._outcome.due is not None and now >= self._outcome.due:
            self._decide(now)
        for each in silent:
            connection = self._agents.cause_of_silence(each, now)
            self._lost(connection, f"no sign of life for {self._agents.lost_seconds:g} s")

    # ---- frames of agents --------------------------------------------------------------------------------------------

    def _read(self, connection: AgentConnection) -> None:
        try:
            for kind, rank, payload in connection.receive():
                self._on_frame(connection, kind, rank, payload)
        except LostError as error:
            if connection.greeted or connection.parent is None or self._outcome.is_ending:
                self._lost(connection, str(error))
            else:
                self._start_directly(connection, connection.parent, str(error))
        if connection.done:
            self._agents.finished(connection)

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
        where = "" if self._description.is_local else f" on {connection.host.name}"
        if rank <= agent.FIRST_TUNNEL:
            self._read_tunnel(connection, kind, rank, payload)
        elif rank == agent.CHECK:
            self._on_check(connection, kind, payload)
        elif kind in (agent.STDOUT, agent.STDERR):
            self._console.feed(rank, 0 if kind == agent.STDOUT else 1, payload)
        elif kind == agent.PID:
            self._outcome.started.add(rank)
            self._console.say(f"rank {rank} is pid {struct.unpack('!i', payload)[0]}{where}")
            self._begin_input(connection, rank)
        elif kind == agent.TAKEN and self._input is not None:
            self._input.taken(*agent.COUNT.unpack(payload))
        elif kind == agent.ENDED:
            self._on_rank_end(connection, rank, *struct.unpack("!i", payload))
        elif kind == agent.NOT_STARTED:
            self._on_not_started(connection, rank, payload.decode(errors="replace"), where)

    def _begin_input(self, connection: AgentConnection, rank: int) -> None:
        """Read standard input for a rank that has started, if it is the one that gets it."""
        if self._input is not None and rank == READER:
            head = agent.NUMBER.pack(rank)
            self._input.begin(lambda data: connection.send(agent.RANK_INPUT, head + data))

    def _on_not_started(
        self, connection: AgentConnection, rank: int, text: str, where: str
    ) -> None:
        self._outcome.ranks_lost(connection.host.ranks)
        self._fail(f"rank {rank} could not be started{where}: {text}", 126, process=rank)

    def _on_check(self, connection: AgentConnection, kind: bytes, payload: bytes) -> None:
        """Handle a frame about a host's probe."""
        if not self._outcome.is_ending:
            try:
                self._startup.feed(connection, kind, payload)
            except StartError as error:
                self._fail(str(error))

    def _on_rank_end(self, connection: AgentConnection, rank: int, code: int) -> None:
        server = self._startup.server
        assert server is not None
        text = f"rank {rank} {describe(code)}"
        self._console.say(text)
        # Waiting for this rank at the rendezvous is an error from now on.
        server.mark_lost(rank, text)
        self._outcome.rank_ended(
            rank,
            code,
            time.monotonic(),
            departures=server.departures(),
            present=server.present(),
            # If a step of Slurm ends, Slurm kills its processes in any order: a rank may end before the agent.
            may_be_lost=connection.step is not None and was_killed(code),
        )

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _lost(self, connection: AgentConnection, why: str) -> None:
        """A host is lost. Processes on another host are ended by their agent, those on this host by :meth:`run`."""
        name = connection.host.name
        for each in self._agents.drop(connection):
            self._outcome.ranks_lost(each.host.ranks)
            if self._startup.server is not None:
                for rank in each.host.ranks:
                    text = f"rank {rank} is on {each.host.name}, which is lost"
                    self._startup.server.mark_lost(rank, text)
        self._fail(why if connection.host.is_local else f"host {name}: {why}", all_ranks=True)

    def _decide(self, now: float) -> None:
        """End the job because of the rank that failed first or, if a host has become silent, because of that host,
        which is the likely cause."""
        for connection in self._agents.open_remote:
            seconds = now - connection.heard
            if seconds > self._agents.quiet_seconds:
                cause = self._agents.cause_of_silence(connection, now)
                self._lost(cause, f"no sign of life for {seconds:.0f} s")
                return
        self._outcome.fail_first_rank(now)
        self._agents.send(agent.TERMINATE)

    def _fail(
        self, text: str, code: int = 1, *, all_ranks: bool = False, process: int | None = None
    ) -> None:
        now = time.monotonic()
        self._outcome.fail(text, now, code, all_ranks=all_ranks, process=process)
        self._agents.send(agent.TERMINATE)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Sent from the signal handler, since the loop may be stuck writing a log to a slow disk.
        self._agents.send(self._outcome.interrupt(number, time.monotonic()))

    def _on_suspension(self, *_: object) -> None:
        """Ctrl-Z: tell other hosts not to take the silence for the launcher's end, then stop."""
        self._agents.announce_suspension()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _end(self) -> None:
        """End all processes of the job, whatever has happened."""
        if self._input is not None:
            self._input.close()
        self._agents.close(_CLOSE_SECONDS)
        agent.kill_descendants()
        self._startup.close()

    def _report(self, woken: socket.socket) -> None:
        """Print the last line, and wait until all output is written; a further signal ends the wait."""
        signals = self._outcome.signals
        self._console.close(
            "" if self._is_reported_by_caller else self._outcome.verdict,
            woken.fileno(),
            failed=self._outcome.is_ending,
            is_over=lambda: self._outcome.signals > signals,
        )
