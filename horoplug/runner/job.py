"""Runs the ranks through agents, one on each host: relays their output, ends all when one fails, and tells why.

The launcher serves the rendezvous and decides; the agents (agent.py) own the processes. They talk over the agents'
stdin and stdout, here or through ssh (link.py)."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from horoplug.base import config
from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.store.report import KEY, unpack
from horoplug.rendezvous.store.server import StoreServer

from . import agent
from .agent_connection import AgentConnection, LostError, describe_job
from .blame import Blame, describe
from .environment import common_environment, forwarded, job_environment, rank_environment
from .hosts import Placement, numbers
from .output import Descriptor, Output
from .preflight import StartError
from .remote import Ssh
from .start import Start
from .status import SECONDS, Status, fit, in_foreground, wanted

GRACE_SECONDS = 5.0
_BEAT_SECONDS = 5.0  # at most, between two signs of life to another host
_LATER = 10.0  # seconds after which hosts are given up, beyond the ranks' own limit: theirs is the better error
_NO_RANKS_SECONDS = 2.0  # for agents to end before ranks have begun
_END_SECONDS = 12.0  # for an agent to end everything, beyond the grace period


class Job:
    """One job, from start to exit code."""

    def __init__(
        self,
        command: list[str],
        size: int,
        settings: Mapping[str, str],
        *,
        hosts: Sequence[Placement],
        began: float,
        ssh: Ssh | None = None,
        interfaces: Sequence[str] = (),
        compat: bool = False,
        folder: Path | None = None,
        timestamps: bool = False,
        verbose: bool = False,
        status: bool = False,
        variables: Mapping[str, str] | None = None,
        serve: Callable[[str, bytes], Mapping[str, str]] | None = None,
    ) -> None:
        """``settings``: environment variables for the ranks, without prefix. ``hosts``: where they run. ``began``: when
        the user began to wait, by time.monotonic(). ``ssh``: how other hosts are reached; None: as ssh does it by
        itself. ``interfaces``: names of the network interfaces to use; none: they are found out. ``variables``: for the
        ranks, by their full names. ``serve``: called with an address that all ranks reach and the job's secret before
        they begin, returns further variables for them; whoever gives it also has the last word (:attr:`verdict`).
        ``status``: a line about the job at the bottom of the terminal, if there is one.

        Errors: ValueError for a wrong variable; OSError if the folder for the output cannot be made."""
        self._command = command
        self._size = size
        self._settings = settings
        self._placements = hosts
        self._began = began
        self._ssh = ssh or Ssh()
        self._compat = compat
        self._verbose = verbose
        self._variables = dict(variables or {})
        self._serve = serve
        plain = common_environment(os.environ, settings)
        named: str | None = config.value("GLOO_IFACE", plain)
        self._interfaces = tuple(interfaces) or tuple((named or "").replace(",", " ").split())
        self._own_interface: str | None = None
        if interfaces and self._is_local:
            self._own_interface = select_interfaces(interfaces)[0].name
        self._start_seconds: float = config.value("START_TIMEOUT", plain)
        patience: float = config.value("GLOO_TIMEOUT_SECONDS", plain)
        # Seconds without a word after which a host, or the launcher, is gone, and after which that is likely.
        self._silence = patience + _LATER
        self._beat = min(patience / 6, _BEAT_SECONDS)
        self._quiet = max(3 * self._beat, 2.0)
        writers = (Descriptor(1), Descriptor(2))
        self._output = Output(size, writers, folder=folder, timestamps=timestamps)
        self._status: Status | None = None
        if status and wanted(os.environ, [writer.terminal for writer in writers]):
            self._status = Status(size, time.monotonic())
            self._settings = dict(settings) | {"STATUS_SECONDS": str(SECONDS)}
        self._started: set[int] = set()
        self._gone: set[int] = set()  # ranks whose process has ended
        self._secret = secrets.token_bytes(32)
        self._blame = Blame(range(size))
        self._cause: tuple[str, int] | None = None  # last line and exit code
        self._interrupts = 0
        self._end_by: float | None = None
        self._links: list[AgentConnection] = []
        self._open: set[AgentConnection] = set()  # those that have not ended
        self._server: StoreServer | None = None  # None: still looking for a place for it
        self._start: Start | None = None

    @property
    def _is_local(self) -> bool:
        return all(host.is_local for host in self._placements)

    def run(self) -> int:
        """Start the ranks and stay until the last process of the job has ended. Returns the exit code."""
        agent.become_subreaper()  # should the agent be killed, what it leaves is found here
        woken_in, woken_out = socket.socketpair()
        woken_in.setblocking(False)
        woken_out.setblocking(False)
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, self._on_signal)
        if not self._is_local and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_suspension)
        wakeup = signal.set_wakeup_fd(woken_out.fileno(), warn_on_full_buffer=False)
        try:
            with woken_in, woken_out:
                self._begin()
                with self._beats():
                    self._loop(woken_in)
        except BrokenPipeError:
            # Whoever read the output has had enough, as in "horovodrun ... | head".
            self._cause = "", 128 + signal.SIGPIPE
        finally:
            signal.set_wakeup_fd(wakeup)
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._report()

    @property
    def verdict(self) -> str:
        """Why the job has failed, as one line; empty if it has not."""
        return self._cause[0] if self._cause is not None else ""

    # ---- the start ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the agents; with other hosts, what has to be found out before ranks begin, too."""
        if self._is_local:
            self._server = StoreServer(self._secret)
            self._say(f"rendezvous on {self._server.address[0]}:{self._server.address[1]}")
        connect_seconds = min(10.0, self._start_seconds * 2 / 3)
        try:
            for host in self._placements:
                link = AgentConnection(host, self._ssh, connect_seconds)
                self._links.append(link)
                self._open.add(link)
            if self._server is not None:
                self._send_job()
                if self._is_ending:
                    self._command_agents(b"T")  # a signal came before there was anyone to tell
                return
            self._start = Start(
                self._links, self._secret, self._interfaces, self._began, self._start_seconds
            )
        except (StartError, LostError) as error:
            self._fail(str(error))
            return
        check = [self._ssh.python, "-m", "horoplug.runner.probe"]
        for link in self._links:
            command = [sys.executable, *check[1:]] if link.host.is_local else check
            link.send(b"C", self._description(link, command, self._common(link), None))
            link.send(b"M", self._start.question())
        if self._is_ending:
            self._command_agents(b"T")

    def _common(self, link: AgentConnection) -> dict[str, str]:
        outer = os.environ if link.host.is_local else forwarded(os.environ)
        return common_environment(outer, self._settings, compat=self._compat)

    def _description(
        self,
        link: AgentConnection,
        command: list[str],
        env: Mapping[str, str],
        ranks: Mapping[int, Mapping[str, str]] | None,
    ) -> bytes:
        remote = not link.host.is_local
        return describe_job(
            command,
            env,
            ranks,
            inherit=remote,
            silence=self._silence if remote else None,
            grace=GRACE_SECONDS,
        )

    def _send_job(self) -> None:
        """Have the ranks begin."""
        assert self._server is not None
        if self._serve is not None:
            self._variables |= self._serve(self._server.address[0], self._secret)
        places = numbers(self._placements)
        for link in self._links:
            env = job_environment(
                self._common(link),
                size=self._size,
                server=self._server.address,
                secret=self._secret,
                host=None if self._is_local else link.host.name,
                interface=self._start.interface(link) if self._start else self._own_interface,
            )
            ranks = {rank: rank_environment(rank, places[rank]) for rank in link.host.ranks}
            command = self._command
            if self._serve is not None and command[0] == sys.executable and not link.host.is_local:
                command = [self._ssh.python, *command[1:]]  # a function, by the Python of there
            link.send(b"J", self._description(link, command, env | self._variables, ranks))

    def _take_off(self) -> None:
        if self._start is not None and self._start.done:
            self._server = self._start.server()
            self._say(f"rendezvous on {self._server.address[0]}:{self._server.address[1]}")
            self._send_job()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _beats(self) -> Iterator[None]:
        """Signs of life to other hosts, also while the loop is stuck writing to a terminal that has been stopped."""
        remote = [link for link in self._links if not link.host.is_local]
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self._beat):
                for link in remote:
                    link.beat()

        thread = threading.Thread(target=beat, daemon=True)
        if remote:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if remote:
                thread.join()

    def _loop(self, woken: socket.socket) -> None:
        while self._open:
            poll = select.poll()
            poll.register(woken, select.POLLIN)
            actions: dict[int, Callable[[], None]] = {woken.fileno(): lambda: _empty(woken)}
            for link in self._open:
                for fd, event, action in self._wishes(link):
                    poll.register(fd, event)
                    actions[fd] = action
            patience = self._patience()
            asleep = time.monotonic()
            for fd, _ in poll.poll(None if patience is None else 1000 * patience):
                actions[fd]()
            if patience is not None and time.monotonic() > asleep + patience + 1.0:
                # This process was suspended, or stuck writing: whoever was silent meanwhile may have spoken.
                for link in self._open:
                    link.heard = time.monotonic()
            self._look_at_the_clock()

    def _wishes(self, link: AgentConnection) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """What to wait for, and what to do then."""
        yield link.stdout.fileno(), select.POLLIN, lambda: self._read(link)
        if link.stderr is not None and not link.stderr.closed:
            yield link.stderr.fileno(), select.POLLIN, lambda: self._read_complaints(link)
        if link.wants_write:
            yield link.stdin.fileno(), select.POLLOUT, link.flush

    def _patience(self) -> float | None:
        due = [self._end_by]
        if self._status is not None:
            due.append(self._status.due)
        if not self._is_ending:
            due.append(self._blame.due)
            if self._start is not None and self._server is None:
                due.append(self._start.due)
        due += [self._silent_at(link) for link in self._open if not link.host.is_local]
        known = [when for when in due if when is not None]
        return max(min(known) - time.monotonic(), 0) + 0.001 if known else None

    def _silent_at(self, link: AgentConnection) -> float:
        """When another host counts as lost, unless something comes from it. At the end nobody waits for long."""
        if not self._is_ending:
            return link.heard + self._silence
        return link.heard + self._quiet if link.greeted else 0.0

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
        self._output.show_status(fit(line, 2) if foreground else "", draw=foreground)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        self._show_status(now)
        silent = [
            link for link in self._open if not link.host.is_local and now > self._silent_at(link)
        ]
        if self._is_ending:
            for link in list(self._open) if now > (self._end_by or math.inf) else silent:
                self._drop(link)
            return
        if self._start is not None and self._server is None:
            try:
                self._start.turn()
                self._take_off()
            except StartError as error:
                self._fail(str(error))
        elif self._blame.due is not None and now >= self._blame.due:
            self._decide(now)
        for link in silent:
            self._lost(link, f"no sign of life for {self._silence:g} s")

    # ---- what agents say ---------------------------------------------------------------------------------------------

    def _read(self, link: AgentConnection) -> None:
        try:
            for kind, rank, payload in link.receive():
                self._on_frame(link, kind, rank, payload)
        except LostError as error:
            self._lost(link, str(error))
        if link.done:
            self._open.discard(link)

    def _read_complaints(self, link: AgentConnection) -> None:
        text = link.read_complaints()
        for line in text.splitlines():
            self._say(f"host {link.host.name}: {line.strip()}")

    def _on_frame(self, link: AgentConnection, kind: bytes, rank: int, payload: bytes) -> None:
        if rank == agent.CHECK:
            self._on_check(link, kind, payload)
        elif kind in (agent.STDOUT, agent.STDERR):
            self._output.feed(rank, 0 if kind == agent.STDOUT else 1, payload)
        elif kind == b"P":
            self._started.add(rank)
            where = "" if self._is_local else f" on {link.host.name}"
            self._say(f"rank {rank} is pid {struct.unpack('!i', payload)[0]}{where}")
        elif kind == b"X":
            self._ended(rank, *struct.unpack("!i", payload))
        elif kind == b"E":
            where = "" if self._is_local else f" on {link.host.name}"
            text = payload.decode(errors="replace")
            self._blame.lost(link.host.ranks)
            self._fail(f"rank {rank} could not be started{where}: {text}", 126)

    def _on_check(self, link: AgentConnection, kind: bytes, payload: bytes) -> None:
        """A frame about a host's probe."""
        if self._start is not None and self._server is None and not self._is_ending:
            try:
                self._start.feed(link, kind, payload)
                self._take_off()
            except StartError as error:
                self._fail(str(error))

    def _ended(self, rank: int, code: int) -> None:
        assert self._server is not None
        self._gone.add(rank)
        self._say(f"rank {rank} {describe(code)}")
        # Whoever still waits for this rank at the rendezvous waits in vain.
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

    def _lost(self, link: AgentConnection, why: str) -> None:
        """Nothing more will come from a host. What is left there ends by itself; here, :meth:`run` kills it."""
        self._drop(link)
        self._blame.lost(link.host.ranks)
        if self._server is not None:
            for rank in link.host.ranks:
                self._server.mark_lost(rank, f"rank {rank} is on {link.host.name}, which is lost")
        self._fail(why if link.host.is_local else f"host {link.host.name}: {why}", all_ranks=True)

    # ---- the end -----------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._cause is not None

    def _decide(self, now: float) -> None:
        """The first failure is known: end the others. A host that has fallen silent meanwhile is its likely reason."""
        silent = {link: now - link.heard for link in self._open if not link.host.is_local}
        for link, seconds in silent.items():
            if seconds > self._quiet:
                self._lost(link, f"no sign of life for {seconds:.0f} s")
                return
        code = self._blame.code
        self._fail(f"rank {self._blame.first} {describe(code)}", code if code >= 0 else 128 - code)

    def _fail(self, text: str, code: int = 1, *, all_ranks: bool = False) -> None:
        if self._cause is None:
            begun = self._server is not None
            others = "; the other ranks were ended" if self._blame.running and begun else ""
            self._cause = text + ("; all ranks were ended" if all_ranks and begun else others), code
        self._command_agents(b"T")

    def _drop(self, link: AgentConnection) -> None:
        """Wait no more for an agent. On another host it ends everything by itself, as soon as it notices."""
        self._open.discard(link)
        link.end(0.0)

    def _command_agents(self, command: bytes) -> None:
        """Have everything ended, softly (T) or at once (K)."""
        if self._end_by is None:
            seconds = _NO_RANKS_SECONDS if self._server is None else GRACE_SECONDS + _END_SECONDS
            self._end_by = time.monotonic() + seconds
        for link in self._links:
            link.send(command)

    # ---- signals -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._interrupts += 1
        if self._cause is None:
            name = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(
                signal.Signals(number), f"ended by {signal.Signals(number).name}"
            )
            self._cause = f"{name}; all ranks were ended", 128 + number
        # Straight from here, because the loop may be stuck writing to a terminal that has been stopped.
        self._command_agents(b"T" if self._interrupts == 1 else b"K")

    def _on_suspension(self, *_: object) -> None:
        """Ctrl-Z: other hosts are told not to take the silence for an end."""
        for link in self._links:
            if not link.host.is_local:
                link.send(b"Z")
        os.kill(os.getpid(), signal.SIGSTOP)

    def _end(self) -> None:
        """Nothing is to be left, whatever has happened."""
        for link in self._links:
            link.end(15.0)
        agent.kill_descendants()
        if self._start is not None:
            self._start.close()
        if self._server is not None:
            self._server.close()

    def _report(self) -> int:
        text, code = self._cause or ("", 0)
        try:
            self._output.close()
            if text and self._serve is None:
                self._output.notice(f"horovodrun: {text}")
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
        return code

    def _say(self, text: str) -> None:
        if self._verbose:
            self._output.notice(f"horovodrun: {text}")


def _empty(woken: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        woken.recv(4096)
