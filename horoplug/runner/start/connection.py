"""The launcher's connection to one agent, with which it exchanges frames; links.py has the ways to an agent."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator

from horoplug.runner.agent import agent
from horoplug.runner.agent.links import PipeLink, Tunnel
from horoplug.runner.ending.blame import describe
from horoplug.runner.hosts.hosts import Placement

from .starters import AgentStarter

MAX_FRAME = 1 << 24
_MAX_NOISE = 1 << 20  # bytes that a login shell may print before the agent's greeting
_GUARD_SECONDS = 12.0  # limit for a guard to kill what its agent has left
_MAX_STDERR = 1 << 13  # last bytes of ssh's stderr that are kept

# Guards what is queued for all agents: signal handlers and the ping thread send, too. It is one lock, since frames for
# an agent become frames for the agent that has started it.
_lock = threading.RLock()


class LostError(Exception):
    """The agent has ended, or has sent something invalid; the text tells why."""


class AgentConnection:
    """The agent of one host. Frames are queued until the agent's greeting has arrived, so that another way to the host
    can replace one that has failed."""

    def __init__(
        self,
        host: Placement,
        starter: AgentStarter,
        number: int = 0,
        parent: AgentConnection | None = None,
    ) -> None:
        """``starter``: starts the agent; ``number``: of the host in the job; ``parent``: the agent that starts this
        one, None: the launcher does."""
        self.host = host
        self.ranks = set(host.ranks)
        """The ranks that the agent starts. An elastic job adds further ones."""
        self.starter = starter
        self.parent = parent
        self.greeted = False
        self.done = False  # whether it has reported that all its processes have ended
        self.heard = math.inf  # the time of the agent's last sign of life
        self._number = agent.FIRST_TUNNEL - number
        self._inbox = bytearray()
        self._outbox = bytearray()  # frames before the greeting
        self._stderr_tail = bytearray()
        self._children: dict[int, AgentConnection] = {}  # by the number of their tunnel
        self.link: PipeLink | Tunnel
        if parent is None:
            self.link = starter.link(host, _lock)
        else:
            parent._children[self._number] = self
            self.link = starter.tunnel(host, parent, self._number)

    def start(self) -> None:
        """Start the agent. Errors: LostError if what starts it cannot be run."""
        self.heard = time.monotonic()
        try:
            self.starter.start()
            self.link.start()
        except OSError as error:
            raise LostError(f"{self.link.name} cannot be run: {error.strerror}") from None

    def start_directly(self) -> None:
        """Let the launcher start the agent by its own ssh, with the next :meth:`start`, after the parent has failed to
        start it."""
        self.parent = None
        self.heard = math.inf
        self._inbox.clear()
        self._stderr_tail.clear()
        self.link = self.starter.link(self.host, _lock)

    @property
    def started(self) -> bool:
        """Whether the agent has been started."""
        return self.link.started

    @property
    def depth(self) -> int:
        """The number of agents between the launcher and this one."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def beyond(self) -> list[AgentConnection]:
        """The connections to all agents that are reached through this one."""
        children = [each for each in self._children.values() if each.parent is self]
        return children + [further for each in children for further in each.beyond]

    # ---- to the agent ------------------------------------------------------------------------------------------------

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send a frame without blocking. Callable from any thread and from signal handlers."""
        frame = agent.COMMAND.pack(kind, len(payload)) + payload
        with _lock:
            if self.greeted:
                self.link.send(frame)
            else:
                self._outbox += frame

    def ping(self) -> None:
        """Tell the agent that the launcher is alive, unless queued frames do so already."""
        with _lock:
            if self.greeted and not self.link.wants_write:
                self.send(agent.PING)

    # ---- from the agent ----------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield (kind, rank, payload) of the frames that have arrived. Errors: LostError."""
        data = self.link.read()
        if data is None:
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
            known = rank == agent.CHECK or rank in self.ranks or rank in self._children
            if length > MAX_FRAME or not known:
                raise LostError("the agent there sent an invalid frame")
            end = agent.FRAME.size + length
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[agent.FRAME.size : end])
            del self._inbox[:end]
            if kind == agent.DONE:
                self.done = True
            yield kind, rank, payload

    def feed_child(self, kind: bytes, number: int, payload: bytes) -> AgentConnection:
        """Handle a frame about the tunnel with a number. Returns the connection that uses the tunnel."""
        child = self._children[number]
        if isinstance(child.link, Tunnel):
            child.link.feed(kind, payload)
        return child

    def _skip_noise(self) -> bool:
        """Drop what was printed before the agent's greeting. Returns whether the greeting has arrived."""
        at = self._inbox.find(agent.GREETING)
        if at < 0:
            if len(self._inbox) > _MAX_NOISE:
                raise LostError("the login shell there prints too much before the agent starts")
            return False
        del self._inbox[: at + len(agent.GREETING)]
        with _lock:
            # In this order, because a signal handler may send a frame in between.
            self.greeted = True
            self.link.send(bytes(self._outbox))
            self._outbox.clear()
        return True

    def read_stderr(self) -> str:
        """The text that ssh has printed since the last call. Its end is kept for :meth:`why_lost`."""
        data = self.link.read_stderr()
        self._stderr_tail += data
        del self._stderr_tail[:-_MAX_STDERR]
        return data.decode(errors="replace")

    def why_lost(self) -> str:
        """Why the agent has ended: its exit code, or the last line of ssh. Closes the connection."""
        self.link.close()
        code = self.link.wait(_GUARD_SECONDS if self.host.is_local else 2.0)
        self.read_stderr()
        # The guard exits with 128 + n if signal n has killed the agent; 255 is an error of ssh itself.
        is_signal = 128 < code <= 128 + signal.SIGRTMAX
        if self.host.is_local:
            return f"the agent on this host {describe(128 - code if is_signal else code)}"
        lines = [line.strip() for line in self._stderr_tail.decode(errors="replace").splitlines()]
        said = [line for line in lines if line]
        how = f"{self.starter.name} {describe(code)}"
        if self.greeted and is_signal:
            return f"the connection was lost: the agent {describe(128 - code)}"
        if self.greeted:
            return f"the connection was lost: {said[-1] if said else how}"
        if code in (126, 127):
            return f"Python cannot be run there: {said[-1] if said else describe(code)}"
        return said[-1] if said else how

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection, which makes the agent end all its processes."""
        with _lock:
            self._outbox.clear()
        self.link.close()

    def end(self, seconds: float) -> None:
        """Close the connection, and wait until the agent has ended.

        ``seconds``: limit for the wait; then the process on this host, the agent or ssh, is killed."""
        with _lock:
            self._outbox.clear()
        self.link.end(seconds)
