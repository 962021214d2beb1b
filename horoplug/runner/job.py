"""Runs the ranks through the agent: relays their output, ends all when one fails, and tells why.

The launcher serves the rendezvous and decides; the agent (agent.py) owns the processes. They talk over the agent's
stdin and stdout."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from horoplug.rendezvous.server import StoreServer

from . import agent
from .environment import job_environment, rank_environment
from .hosts import Host, place
from .output import Descriptor, Output
from .remote import Ssh

GRACE_SECONDS = 5.0
_CAUSE_SECONDS = 2.0  # how long to wait for a rank that left before the one that failed first


class Job:
    """One job, from start to exit code."""

    def __init__(
        self,
        command: list[str],
        size: int,
        settings: Mapping[str, str],
        *,
        hosts: Sequence[Host] | None = None,
        ssh: Ssh | None = None,
        interfaces: Sequence[str] = (),
        compat: bool = False,
        folder: Path | None = None,
        timestamps: bool = False,
        verbose: bool = False,
        variables: Mapping[str, str] | None = None,
        serve: Callable[[str, bytes], Mapping[str, str]] | None = None,
    ) -> None:
        """``settings``: environment variables for the ranks, without prefix. ``hosts``: where they run, one host after
        the other; None: all here. ``ssh``: how other hosts are reached;
        None: as ssh does it by itself. ``interfaces``: names of the network interfaces
        to use; none: they are found out. ``variables``: for the ranks, by their full names. ``serve``: called with an
        address that all ranks reach and the job's secret before they begin; returns further variables for them.

        Errors: UsageError if there are more ranks than slots; OSError if the folder for the output cannot be made."""
        self._hosts = place(hosts, size) if hosts is not None else []
        self._ssh = ssh or Ssh()
        self._interfaces = tuple(interfaces)
        self._command = command
        self._size = size
        self._settings = settings
        self._compat = compat
        self._verbose = verbose
        self._variables = variables or {}
        self._serve = serve
        writers = (Descriptor(1), Descriptor(2))
        self._output = Output(size, writers, folder=folder, timestamps=timestamps)
        self._inbox = bytearray()
        self._running = set(range(size))
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}  # return codes in the order of death
        self._cause: tuple[str, int] | None = None  # last line and exit code
        self._first: int | None = None  # the rank that is the cause, as far as is known
        # Ranks that left the job before that one and have not ended yet, in that order.
        self._suspects: list[int] = []
        self._decide_at: float | None = None
        self._done = False
        self._interrupts = 0
        self._agent: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start the ranks and stay until the last process of the job has ended. Returns the exit code."""
        agent.become_subreaper()  # should the agent be killed, what it leaves is found here
        secret = secrets.token_bytes(32)
        woken_in, woken_out = socket.socketpair()
        woken_in.setblocking(False)
        woken_out.setblocking(False)
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, self._on_signal)
        wakeup = signal.set_wakeup_fd(woken_out.fileno(), warn_on_full_buffer=False)
        try:
            with StoreServer(secret) as server, woken_in, woken_out:
                self._start(server, secret)
                self._loop(server, woken_in)
        except BrokenPipeError:
            # Whoever read the output has had enough, as in "horovodrun ... | head".
            self._cause = "", 128 + signal.SIGPIPE
        finally:
            signal.set_wakeup_fd(wakeup)
            self._end_agent()
            agent.kill_descendants()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._report()

    @property
    def verdict(self) -> str:
        """Why the job has failed, as one line; empty if it has not."""
        return self._cause[0] if self._cause is not None else ""

    def _start(self, server: StoreServer, secret: bytes) -> None:
        env = job_environment(
            os.environ,
            self._settings,
            size=self._size,
            server=server.address,
            secret=secret,
            compat=self._compat,
        )
        env |= self._variables
        if self._serve is not None:
            env |= self._serve(server.address[0], secret)
        ranks = {rank: rank_environment(rank) for rank in range(self._size)}
        description = agent.pack_job(self._command, env, ranks, GRACE_SECONDS)
        self._say(f"rendezvous on {server.address[0]}:{server.address[1]}")
        self._agent = subprocess.Popen(
            # By path and without site: it starts in a few milliseconds, whatever is installed.
            [sys.executable, "-I", "-S", "-X", "utf8", str(Path(agent.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C is the launcher's to handle
        )
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed on its stdout
            view = memoryview(description)
            while view:
                view = view[self._agent.stdin.write(view) or 0 :]
        if self._interrupts:
            self._command_agent(b"T")  # a signal came before there was anyone to tell

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _loop(self, server: StoreServer, woken: socket.socket) -> None:
        assert self._agent is not None
        assert self._agent.stdout is not None
        pipe = self._agent.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not self._done:
                patience = None
                if self._decide_at is not None:
                    patience = max(self._decide_at - time.monotonic(), 0)
                for key, _ in selector.select(patience):
                    if key.fd != pipe:
                        woken.recv(4096)
                        continue
                    data = os.read(pipe, 1 << 18)
                    if not data:
                        self._lost_agent()
                        return
                    self._inbox += data
                    self._parse(server)
                if self._decide_at is not None and time.monotonic() >= self._decide_at:
                    self._decide()

    def _parse(self, server: StoreServer) -> None:
        while len(self._inbox) >= agent.FRAME.size:
            kind, rank, length = agent.FRAME.unpack_from(self._inbox)
            end = agent.FRAME.size + length
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[agent.FRAME.size : end])
            del self._inbox[:end]
            if kind in (agent.STDOUT, agent.STDERR):
                self._output.feed(rank, 0 if kind == agent.STDOUT else 1, payload)
            elif kind == b"P":
                self._pids[rank] = struct.unpack("!i", payload)[0]
                self._say(f"rank {rank} is pid {self._pids[rank]}")
            elif kind == b"X":
                self._ended(rank, struct.unpack("!i", payload)[0], server)
            elif kind == b"E":
                text = payload.decode(errors="replace")
                self._blame(f"rank {rank} could not be started: {text}", 126)
                self._running.clear()
            elif kind == b"D":
                self._done = True

    def _ended(self, rank: int, code: int, server: StoreServer) -> None:
        self._running.discard(rank)
        self._codes[rank] = code
        self._say(f"rank {rank} {describe(code)}")
        # Whoever still waits for this rank at the rendezvous waits in vain.
        server.mark_lost(rank, f"rank {rank} {describe(code)}")
        if self._cause is not None or self._interrupts:
            return
        if self._first is None and code != 0:
            self._first = rank
            # A process takes a while to end after its last words to the others. A rank that left the job earlier than
            # the one that ended first is the more likely cause.
            if code > 0:
                earlier = [*server.departures(), rank]
                self._suspects = [
                    other for other in earlier[: earlier.index(rank)] if other in self._running
                ]
            self._decide_at = time.monotonic() + _CAUSE_SECONDS
        if self._first is not None:
            if rank in self._suspects:
                position = self._suspects.index(rank)
                del self._suspects[position]
                if code not in (0, -signal.SIGTERM):
                    self._first = rank
                    del self._suspects[position:]  # they left after it
            if not self._suspects:
                self._decide()

    def _decide(self) -> None:
        """The first failure is known: end the others."""
        assert self._first is not None
        self._decide_at = None
        code = self._codes[self._first]
        self._blame(f"rank {self._first} {describe(code)}", code if code >= 0 else 128 - code)

    def _blame(self, text: str, code: int) -> None:
        if self._cause is None:
            others = "; the other ranks were ended" if self._running else ""
            self._cause = text + others, code
        self._command_agent(b"T")

    def _lost_agent(self) -> None:
        """The agent has gone without a word; what it left is killed by :meth:`run`."""
        assert self._agent is not None
        code = self._agent.wait()
        if self._cause is None:
            self._cause = f"the agent on this host {describe(code)}; all ranks were ended", 1

    # ---- signals and the end -----------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._interrupts += 1
        if self._cause is None:
            name = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(
                signal.Signals(number), f"ended by {signal.Signals(number).name}"
            )
            self._cause = f"{name}; all ranks were ended", 128 + number
        # Straight from here, because the loop may be stuck writing to a terminal that has been stopped.
        self._command_agent(b"T" if self._interrupts == 1 else b"K")

    def _command_agent(self, command: bytes) -> None:
        if self._agent is not None and self._agent.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._agent.stdin.write(command)

    def _end_agent(self) -> None:
        """Close the agent's pipes, which makes it kill what is left, and wait for it."""
        if self._agent is None:
            return
        for pipe in (self._agent.stdin, self._agent.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._agent.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()

    def _report(self) -> int:
        text, code = self._cause or ("", 0)
        try:
            self._output.close()
            if text and self._serve is None:  # else whoever is served is told
                self._output.notice(f"horovodrun: {text}")
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
        return code

    def _say(self, text: str) -> None:
        if self._verbose:
            self._output.notice(f"horovodrun: {text}")


def describe(code: int) -> str:
    """How a process has ended, from its return code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""  # a real-time signal
    return f"was killed by signal {-code}{name}"
