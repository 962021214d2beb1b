"""How bytes travel between the launcher and an agent: over the pipes of a process on this host, which is the agent or
ssh, or through the agent of another host, which has started ssh (a tunnel)."""

from __future__ import annotations

import abc
import contextlib
import json
import os
import struct
import subprocess
import threading
from typing import IO, Protocol

from . import agent


class Sender(Protocol):
    """What sends a frame to an agent."""

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame without blocking."""


class PipeLink(abc.ABC):
    """Two nonblocking pipes to an agent. Bytes that cannot be written at once are queued until :meth:`flush`."""

    name: str
    """The program that makes the connection, for messages."""
    started = False
    """Whether bytes may be written; until then they are queued, and there may be no pipes."""
    stdin: IO[bytes]
    """The pipe to the agent."""
    stdout: IO[bytes]
    """The pipe from the agent."""
    stderr: IO[bytes] | None = None
    """The pipe of messages about the connection, until it ends; None if there is none."""

    def __init__(self, source: bytes, lock: threading.RLock) -> None:
        """``source``: what the agent gets first; ``lock``: guards the queue, since signal handlers and the ping thread
        write, too."""
        self._outbox = bytearray(source)
        self._lock = lock

    @abc.abstractmethod
    def start(self) -> None:
        """Make the connection. Errors: OSError if the program cannot be run."""

    @abc.abstractmethod
    def read_stderr(self) -> bytes:
        """The messages about the connection that have arrived."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> int:
        """Wait until the connection has ended; it is ended by force when ``seconds`` have passed. Returns the exit
        code of the agent, or of what has made the connection."""

    @property
    def wants_write(self) -> bool:
        """Whether bytes are queued for pipes that are open."""
        return self.started and bool(self._outbox)

    def send(self, data: bytes) -> None:
        """Queue bytes, and write them if no earlier bytes wait."""
        with self._lock:
            # If a signal handler calls this during a flush, the interrupted flush sends the new bytes, too.
            self._outbox += data
            if self.started and len(self._outbox) == len(data):
                self.flush()

    def flush(self) -> None:
        """Write as much as possible. A broken pipe is ignored: :meth:`read` notices that the connection has ended."""
        with self._lock, contextlib.suppress(BlockingIOError):
            try:
                while self._outbox:
                    del self._outbox[: os.write(self.stdin.fileno(), self._outbox[: 1 << 16])]
            except (BrokenPipeError, ValueError):
                self._outbox.clear()

    def read(self) -> bytes | None:
        """What has arrived; None if nothing has, no bytes at the end."""
        try:
            return os.read(self.stdout.fileno(), 1 << 18)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close the pipes, which makes the agent end all its processes."""
        if not self.started:
            return
        with self._lock, contextlib.suppress(OSError):
            self._outbox.clear()
            self.stdin.close()
        self.stdout.close()

    def end(self, seconds: float) -> None:
        """Close the pipes, and wait for at most ``seconds`` until the connection has ended."""
        if self.started:
            self.close()
            self.wait(seconds)


class ProcessLink(PipeLink):
    """The pipes of a process on this host: the agent, or ssh."""

    def __init__(
        self, command: list[str], source: bytes, lock: threading.RLock, *, own_stderr: bool
    ) -> None:
        """``own_stderr``: the process prints errors to the launcher's stderr. ``source`` and ``lock`` are those of
        :class:`PipeLink`."""
        super().__init__(source, lock)
        self.name = command[0]
        self._command = command
        self._own_stderr = own_stderr
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the process. Errors: OSError if it cannot be run."""
        with self._lock:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self._own_stderr else subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # the launcher handles the terminal's Ctrl-C
            )
            assert process.stdin is not None
            assert process.stdout is not None
            self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
            for pipe in (self.stdin, self.stdout, self.stderr):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
            self.started = True
        self.flush()

    def read_stderr(self) -> bytes:
        """The messages that have arrived."""
        if self.stderr is None:
            return b""
        try:
            data = os.read(self.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        if not data:
            self._close_stderr()
        return data

    def _close_stderr(self) -> None:
        if self.stderr is not None:
            self.stderr.close()
            self.stderr = None

    def wait(self, seconds: float) -> int:
        """Wait until the process has ended; it is killed when ``seconds`` have passed. Returns its return code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        self._process.kill()
        return self._process.wait()

    def end(self, seconds: float) -> None:
        """Close the pipes, and wait for at most ``seconds`` until the process has ended."""
        super().end(seconds)
        self._close_stderr()


class Tunnel:
    """An ssh process that the agent of another host has started. Its output arrives as frames of that agent."""

    name = "ssh"
    stderr = None
    wants_write = False

    def __init__(self, parent: Sender, number: int, command: list[str], source: bytes) -> None:
        """``parent``: the agent; ``number``: of the tunnel, at that agent; ``source``: what ssh gets first."""
        self.started = False
        self._parent = parent
        self._number = number
        self._command = command
        self._source = source
        self._inbox = bytearray()
        self._messages = bytearray()
        self._closed = False
        self._code: int | None = None

    def start(self) -> None:
        """Tell the agent to start ssh."""
        self.started = True
        command = [agent.pack_text(part) for part in self._command]
        opened = {"number": self._number, "command": command}
        self._parent.send(agent.TUNNEL, json.dumps(opened).encode())
        self.send(self._source)

    def send(self, data: bytes) -> None:
        """Send bytes to ssh's stdin, if there are any."""
        if data and not self._closed:
            self._parent.send(agent.TUNNEL_INPUT, agent.NUMBER.pack(self._number) + data)

    def flush(self) -> None:
        """Do nothing: the connection to the agent has the queue."""

    def feed(self, kind: bytes, payload: bytes) -> None:
        """Handle a frame of the agent about this tunnel."""
        if kind == agent.STDOUT:
            self._inbox += payload
        elif kind == agent.STDERR:
            self._messages += payload
        elif kind == agent.ENDED:
            (self._code,) = struct.unpack("!i", payload)
        elif kind == agent.NOT_STARTED:
            self._messages += payload
            self._code = 127

    def read(self) -> bytes | None:
        """What has arrived; None if nothing has, no bytes at the end."""
        data = bytes(self._inbox)
        self._inbox.clear()
        return None if not data and self._code is None else data

    def read_stderr(self) -> bytes:
        """The messages of ssh that have arrived."""
        data = bytes(self._messages)
        self._messages.clear()
        return data

    def close(self) -> None:
        """End ssh's input, which makes the agent behind it end all its processes."""
        if self.started and not self._closed:
            self._closed = True
            self._parent.send(agent.TUNNEL_INPUT, agent.NUMBER.pack(self._number))

    def wait(self, seconds: float) -> int:
        """The return code of ssh. Without time to wait, it is killed; nothing is waited for, since the end is a frame
        like others."""
        if self._code is None and seconds <= 0:
            self._parent.send(agent.TUNNEL_KILL, agent.NUMBER.pack(self._number))
        return self._code or 0

    def end(self, seconds: float) -> None:
        """End ssh's input, and kill ssh if there is no time to wait."""
        if self.started:
            self.close()
            self.wait(seconds)
