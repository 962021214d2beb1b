"""The agents of all hosts of a job: waits for their messages, sends them pings, and ends them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence

from . import agent
from .agent_connection import AgentConnection
from .hosts import Placement
from .remote import Ssh

CONNECTING = 32  # hosts that ssh connects to at the same time


class Agents:
    """The connections to all agents. :attr:`open` has those whose agent was started and has not ended."""

    def __init__(self, lost_seconds: float, ping_seconds: float, quiet_seconds: float) -> None:
        """``lost_seconds``: seconds without a frame after which another host counts as lost; ``ping_seconds``: interval
        of pings to other hosts; ``quiet_seconds``: the limit in place of ``lost_seconds`` once the job is ending."""
        self.lost_seconds = lost_seconds
        self.quiet_seconds = quiet_seconds
        self.all: list[AgentConnection] = []
        self.open: set[AgentConnection] = set()
        self._ping_seconds = ping_seconds

    def start(self, hosts: Sequence[Placement], ssh: Ssh, connect_seconds: float) -> None:
        """Start an agent on each host. At most :data:`CONNECTING` connections are made at once; :meth:`start_more`
        starts the other agents. Errors: LostError; agents that were started stay in :attr:`open`."""
        self.all = [AgentConnection(host, ssh, connect_seconds) for host in hosts]
        self.start_more()

    def start_more(self) -> None:
        """Start agents that wait until earlier ones have connected. The number of connections in progress is limited
        because every ssh takes CPU time on this host, and gateways and login services refuse too many at once. Errors:
        LostError."""
        waiting = [each for each in self.all if not each.started]
        if not waiting:
            return
        connecting = sum(each.started and not each.greeted for each in self.open_remote)
        for connection in waiting:
            if not connection.host.is_local and connecting >= CONNECTING:
                continue
            connection.start()
            self.open.add(connection)
            connecting += not connection.host.is_local

    @property
    def open_remote(self) -> list[AgentConnection]:
        """The open connections to other hosts."""
        return [connection for connection in self.open if not connection.host.is_local]

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, command: bytes) -> None:
        """Send a command to all agents, also to those that are started later. Callable from signal handlers."""
        for connection in self.all:
            connection.send(command)

    def announce_suspension(self) -> None:
        """Tell the agents on other hosts that this process will send no pings for a while."""
        for connection in self.all:
            if not connection.host.is_local:
                connection.send(agent.SUSPENDED)

    @contextlib.contextmanager
    def pinged(self) -> Iterator[None]:
        """Ping other hosts from a thread, even while this process is stuck writing a log to a slow disk."""
        remote = [connection for connection in self.all if not connection.host.is_local]
        over = threading.Event()

        def ping() -> None:
            while not over.wait(self._ping_seconds):
                for connection in remote:
                    connection.ping()

        thread = threading.Thread(target=ping, daemon=True)
        if remote:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if remote:
                thread.join()

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def wait(
        self, wakeups: Sequence[int], timeout: float | None
    ) -> Iterator[tuple[AgentConnection, bool]]:
        """Wait for events, for at most ``timeout`` seconds, and yield (connection, whether stderr is readable).

        For an event of stdout the second value is False. ``wakeups``: nonblocking descriptors that end the wait, too,
        when they are readable; they are emptied."""
        poll = select.poll()
        for wakeup in wakeups:
            poll.register(wakeup, select.POLLIN)
        readable: dict[int, tuple[AgentConnection, bool]] = {}
        writable: dict[int, AgentConnection] = {}
        for connection in self.open:
            readable[connection.stdout.fileno()] = connection, False
            if connection.stderr is not None and not connection.stderr.closed:
                readable[connection.stderr.fileno()] = connection, True
            if connection.wants_write:
                writable[connection.stdin.fileno()] = connection
        for fd in readable:
            poll.register(fd, select.POLLIN)
        for fd in writable:
            poll.register(fd, select.POLLOUT)
        asleep = time.monotonic()
        for fd, _ in poll.poll(None if timeout is None else 1000 * timeout):
            if fd in readable:
                yield readable[fd]
            elif fd in writable:
                writable[fd].flush()
            else:
                _empty(fd)
        if timeout is not None and time.monotonic() > asleep + timeout + 1.0:
            # This process was suspended and could not read frames, so the silence says nothing about the agents.
            for connection in self.open:
                connection.heard = time.monotonic()

    def silent_at(self, connection: AgentConnection, *, ending: bool) -> float:
        """The time at which another host counts as lost unless it sends something (``time.monotonic()``).

        ``ending``: the limit is shorter while the job is ending."""
        if not ending:
            return connection.heard + self.lost_seconds
        return connection.heard + self.quiet_seconds if connection.greeted else 0.0

    def silent(self, now: float, *, ending: bool) -> list[AgentConnection]:
        """The connections to hosts that count as lost by now."""
        return [each for each in self.open_remote if now > self.silent_at(each, ending=ending)]

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self, connection: AgentConnection) -> None:
        """Stop waiting for an agent. On another host, it ends all its processes itself as soon as it notices."""
        self.open.discard(connection)
        connection.end(0.0)

    def close(self, seconds: float) -> None:
        """Close all connections and wait up to ``seconds`` for each agent to end."""
        for connection in self.all:
            connection.end(seconds)


def _empty(wakeup: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wakeup, 4096)
