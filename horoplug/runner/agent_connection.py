"""The launcher's end of one agent: a process, here or behind ssh, that frames go to and come from."""

from __future__ import annotations

import contextlib
import json
import os
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
_MAX_NOISE = 1 << 20  # what a login shell may say before the agent does
_MAX_COMPLAINTS = 1 << 13  # of ssh, or a login shell, that are kept: the last ones


class LostError(Exception):
    """The agent is not there any more, or has said something that makes no sense; the text says why."""


class AgentConnection:
    """The agent of one host. What is sent waits, if need be, until :meth:`flush` finds room for it."""

    def __init__(self, host: Placement, ssh: Ssh, connect_seconds: float) -> None:
        """Start it. Errors: LostError if there is no such program as ssh."""
        self.host = host
        self.greeted = False
        self.done = False  # it has said that everything there has ended
        self.heard = time.monotonic()
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._complaints = bytearray()
        # Of the outbox: signal handlers and the thread of beats write, too.
        self._lock = threading.RLock()
        if host.is_local:
            # By path and without site: it starts in a few milliseconds, whatever is installed.
            source = str(Path(agent.__file__).resolve())
            command = [sys.executable, "-I", "-S", "-X", "utf8", source]
        else:
            command = ssh.command(host.name, connect_seconds)
            self._outbox += Path(agent.__file__).read_bytes() + END_OF_SOURCE
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if host.is_local else subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to handle
            )
        except OSError as error:
            raise LostError(f"{command[0]} cannot be run: {error.strerror}") from None
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def _pipes(self) -> list[IO[bytes]]:
        """stdin and stdout, and stderr unless that is the launcher's own."""
        process = self._process
        return [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe]

    @property
    def stdin(self) -> IO[bytes]:
        """Where frames go."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Where they come from."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """What ssh says; None on this host."""
        return self._process.stderr

    # ---- to the agent ------------------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame, as far as that is possible at once. For any thread, and for signal handlers."""
        with self._lock:
            # In the middle of another flush, this only adds to what that has to send.
            self._outbox += agent.COMMAND.pack(kind, len(payload)) + payload
            if len(self._outbox) == agent.COMMAND.size + len(payload):
                self.flush()

    def beat(self) -> None:
        """Say that the launcher lives, unless something else that says so is under way."""
        with self._lock:
            if not self._outbox:
                self.send(b"B")

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room."""
        return bool(self._outbox)

    def flush(self) -> None:
        """Write what there is room for. That the agent has gone is noticed when it is read from."""
        with self._lock, contextlib.suppress(BlockingIOError):
            try:
                while self._outbox:
                    del self._outbox[: os.write(self.stdin.fileno(), self._outbox[: 1 << 16])]
            except (BrokenPipeError, ValueError):
                self._outbox.clear()

    # ---- from the agent ----------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[bytes, int, bytes]]:
        """(kind, rank, payload) of the frames that have come. Errors: LostError."""
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
                raise LostError("what came from there makes no sense")
            end = agent.FRAME.size + length
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[agent.FRAME.size : end])
            del self._inbox[:end]
            if kind == b"D":
                self.done = True
            yield kind, rank, payload

    def _skip_noise(self) -> bool:
        """Drop what was said before the agent's greeting; whether that has come."""
        at = self._inbox.find(agent.GREETING)
        if at < 0:
            if len(self._inbox) > _MAX_NOISE:
                raise LostError("a login there says too much before anything begins")
            return False
        del self._inbox[: at + len(agent.GREETING)]
        self.greeted = True
        return True

    def read_complaints(self) -> str:
        """What ssh has said since the last time. The last of it is kept for :meth:`why_lost`."""
        if self.stderr is None or self.stderr.closed:
            return ""
        try:
            data = os.read(self.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return ""
        if not data:
            self.stderr.close()
        self._complaints += data
        del self._complaints[:-_MAX_COMPLAINTS]
        return data.decode(errors="replace")

    def why_lost(self) -> str:
        """Why the agent has gone, which is now certain: its exit code, or what ssh has said last."""
        self._close()
        code = self._wait(2.0)
        self.read_complaints()
        if self.host.is_local:
            return f"the agent on this host {describe(code)}"
        lines = [line.strip() for line in self._complaints.decode(errors="replace").splitlines()]
        said = [line for line in lines if line]
        if self.greeted:
            return f"the connection was lost: {said[-1] if said else 'ssh ' + describe(code)}"
        if code in (126, 127):
            return f"Python cannot be run there: {said[-1] if said else describe(code)}"
        return said[-1] if said else f"ssh {describe(code)}"

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        """Close the pipes, which makes the agent kill what is left, and wait for it, or kill what leads there."""
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
    """The payload of a job or, without ``ranks``, of a check. ``env``: for all ranks; ``ranks``: what is each one's
    alone; ``inherit``: on top of what the agent has; ``silence``: seconds without a word from the launcher after which
    it counts as gone."""

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
