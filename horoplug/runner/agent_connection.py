"""The launcher's connection to one agent: a process on this host or behind ssh, with which it exchanges frames."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from . import agent
from .agent import pack_text
from .blame import describe
from .hosts import Placement
from .remote import END_OF_SOURCE, Ssh

MAX_FRAME = 1 << 24
_MAX_NOISE = 1 << 20  # bytes that a login shell may print before the agent's greeting
_GUARD_SECONDS = 12.0  # limit for a guard to kill what its agent has left
_MAX_STDERR = 1 << 13  # last bytes of ssh's stderr that are kept


class LostError(Exception):
    """The agent has ended, or has sent something invalid; the text tells why."""


class AgentConnection:
    """The agent of one host. Frames that cannot be written at once are queued until :meth:`flush`."""

    def __init__(self, host: Placement, ssh: Ssh, connect_seconds: float) -> None:
        """``connect_seconds``: limit for ssh to connect."""
        self.host = host
        self.greeted = False
        self.done = False  # whether it has reported that all its processes have ended
        self.heard = math.inf  # the time of the agent's last sign of life
        self._running: subprocess.Popen[bytes] | None = None
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._stderr_tail = bytearray()
        # Guards the outbox: signal handlers and the ping thread write, too.
        self._lock = threading.RLock()
        if host.is_local:
            # By path and without site-packages, so that it starts in a few milliseconds.
            source = str(Path(agent.__file__).resolve())
            self._command = [sys.executable, "-I", "-S", "-X", "utf8", source]
        else:
            self._command = ssh.command(host.name, connect_seconds)
            self._outbox += Path(agent.__file__).read_bytes() + END_OF_SOURCE

    def start(self) -> None:
        """Start the agent, which gets the frames that are queued already. Errors: LostError if ssh cannot be run."""
        self.heard = time.monotonic()
        with self._lock:
            try:
                self._running = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=None if self.host.is_local else subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,  # the launcher handles the terminal's Ctrl-C
                )
            except OSError as error:
                raise LostError(f"{self._command[0]} cannot be run: {error.strerror}") from None
            for pipe in self._pipes:
                os.set_blocking(pipe.fileno(), False)
        self.flush()

    @property
    def started(self) -> bool:
        """Whether the agent has been started."""
        return self._running is not None

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._running is not None
        return self._running

    @property
    def _pipes(self) -> list[IO[bytes]]:
        """stdin and stdout, and stderr unless that is the launcher's own. None before the start."""
        process = self._running
        return [p for p in (process.stdin, process.stdout, process.stderr) if p] if process else []

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe for frames to the agent."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe of frames from the agent."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """The pipe of ssh's messages; None on this host."""
        return self._process.stderr

    # ---- to the agent ------------------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame without blocking. Callable from any thread and from signal handlers."""
        with self._lock:
            # If a signal handler calls this during a flush, the interrupted flush sends the new frame, too.
            self._outbox += agent.COMMAND.pack(kind, len(payload)) + payload
            if self.started and len(self._outbox) == agent.COMMAND.size + len(payload):
                self.flush()

    def ping(self) -> None:
        """Tell the agent that the launcher is alive, unless queued frames do so already."""
        with self._lock:
            if not self._outbox:
                self.send(agent.PING)

    @property
    def wants_write(self) -> bool:
        """Whether frames are queued for a running agent."""
        return self.started and bool(self._outbox)

    def flush(self) -> None:
        """Write as much as possible. A broken pipe is ignored: :meth:`receive` notices that the agent has ended."""
        with self._lock, contextlib.suppress(BlockingIOError):
            try:
                while self._outbox:
                    del self._outbox[: os.write(self.stdin.fileno(), self._outbox[: 1 << 16])]
            except (BrokenPipeError, ValueError):
                self._outbox.clear()

    # ---- from the agent ----------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield (kind, rank, payload) of the frames that have arrived. Errors: LostError."""
        try:
            data = os.read(self.stdout.fileno(), 1 << 18)
        except BlockingIOError:
            return
        if not data:
            if self.done:
                return
            raise LostError(self.why_lost())
        self.heard = time.monotonic()
        self._inbox += data
        if not self.greeted and not self._skip_noise():
            return
        while len(self._inbox) >= agent.FRAME.size:
            kind, rank, length = agent.FRAME.unpack_from(self._inbox)
            if length > MAX_FRAME or not (rank == agent.CHECK or rank in self.host.ranks):
                raise LostError("the agent there sent an invalid frame")
            end = agent.FRAME.size + length
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[agent.FRAME.size : end])
            del self._inbox[:end]
            if kind == agent.DONE:
                self.done = True
            yield kind, rank, payload

    def _skip_noise(self) -> bool:
        """Drop what was printed before the agent's greeting. Returns whether the greeting has arrived."""
        at = self._inbox.find(agent.GREETING)
        if at < 0:
            if len(self._inbox) > _MAX_NOISE:
                raise LostError("the login shell there prints too much before the agent starts")
            return False
        del self._inbox[: at + len(agent.GREETING)]
        self.greeted = True
        return True

    def read_stderr(self) -> str:
        """The text that ssh has printed since the last call. Its end is kept for :meth:`why_lost`."""
        if self.stderr is None or self.stderr.closed:
            return ""
        try:
            data = os.read(self.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return ""
        if not data:
            self.stderr.close()
        self._stderr_tail += data
        del self._stderr_tail[:-_MAX_STDERR]
        return data.decode(errors="replace")

    def why_lost(self) -> str:
        """Why the agent has ended: its exit code, or the last line of ssh. Closes the connection."""
        self._close()
        code = self._wait(_GUARD_SECONDS if self.host.is_local else 2.0)
        self.read_stderr()
        # The guard exits with 128 + n if signal n has killed the agent; 255 is an error of ssh itself.
        is_signal = 128 < code <= 128 + signal.SIGRTMAX
        if self.host.is_local:
            return f"the agent on this host {describe(128 - code if is_signal else code)}"
        lines = [line.strip() for line in self._stderr_tail.decode(errors="replace").splitlines()]
        said = [line for line in lines if line]
        if self.greeted and is_signal:
            return f"the connection was lost: the agent {describe(128 - code)}"
        if self.greeted:
            return f"the connection was lost: {said[-1] if said else 'ssh ' + describe(code)}"
        if code in (126, 127):
            return f"Python cannot be run there: {said[-1] if said else describe(code)}"
        return said[-1] if said else f"ssh {describe(code)}"

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        """Close the pipes, which makes the agent end all its processes, and wait until it has ended.

        ``seconds``: limit for the wait; then the process on this host, the agent or ssh, is killed."""
        if not self.started:
            return
        self._close()
        self._wait(seconds)
        for pipe in self._pipes:
            pipe.close()

    def _close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._outbox.clear()
            self.stdin.close()
        self.stdout.close()

    def _wait(self, seconds: float) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        self._process.kill()
        return self._process.wait()


def describe_job(
    command: list[str],
    env: Mapping[str, str],
    ranks: Mapping[int, Mapping[str, str]] | None,
    *,
    inherit: bool,
    silence: float | None,
    grace: float,
) -> bytes:
    """The payload that describes a job to an agent or, without ``ranks``, a check.

    ``env``: variables of all ranks; ``ranks``: each rank's own variables; ``inherit``: whether the agent's own
    variables are added; ``silence``: seconds without a frame after which the launcher counts as gone, None: never;
    ``grace``: seconds between SIGTERM and SIGKILL."""

    def packed(variables: Mapping[str, str]) -> dict[str, str]:
        return {pack_text(name): pack_text(value) for name, value in variables.items()}

    job: dict[str, Any] = {
        "command": [pack_text(part) for part in command],
        "cwd": pack_text(os.getcwd()),
        "env": packed(env),
        "inherit": inherit,
        "silence": silence,
        "grace": grace,
    }
    if ranks is not None:
        job["ranks"] = [{"rank": rank, "env": packed(own)} for rank, own in ranks.items()]
    return json.dumps(job).encode()
