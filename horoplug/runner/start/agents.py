"""The agents of all hosts of a job: waits for their messages, sends them pings, and ends them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence

from horoplug.runner.agent import agent
from horoplug.runner.agent.links import PipeLink
from horoplug.runner.hosts.hosts import Placement

from . import spawn_tree
from .connection import AgentConnection
from .starters import AgentStarter, LocalStarter

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

    def start(self, hosts: Sequence[Placement], starter: AgentStarter | None) -> None:
        """Start an agent on each host, some of them by the agents of other hosts (spawn_tree.py). At most
        :data:`CONNECTING` connections are made from this host at once; :meth:`start_more` starts the other agents.
        ``starter``: starts those of other hosts, None: there are none. Errors: LostError; agents that were started stay
        in :attr:`open`."""
        remote = [host for host in hosts if not host.is_local]
        found: dict[Placement, AgentConnection] = {}
        if starter is not None:
            is_tree = starter.is_limited
            tree = spawn_tree.parents(len(remote)) if is_tree else [None] * len(remote)
            for number, parent in enumerate(tree):
                above = None if parent is None else found[remote[parent]]
                host = remote[number]
                found[host] = AgentConnection(host, starter, number, above)
        self.all = [found.get(host) or AgentConnection(host, LocalStarter()) for host in hosts]
        self.start_more()

    def add(self, host: Placement, starter: AgentStarter | None) -> AgentConnection:
        """Add the agent of a further host, which is started when it is :meth:`due`. ``starter``: None for this host."""
        connection = AgentConnection(host, starter or LocalStarter())
        self.all.append(connection)
        return connection

    def start_more(self) -> None:
        """Start agents that wait until earlier ones have connected. Errors: LostError."""
        for connection in self.due():
            self.start_one(connection)

    def start_one(self, connection: AgentConnection) -> None:
        """Start an agent that is :meth:`due`. Errors: LostError."""
        connection.start()
        self.open.add(connection)

    def due(self) -> list[AgentConnection]:
        """The agents to start now. The number of connections in progress is limited because every ssh takes CPU time on
        this host, and gateways and login services refuse too many at once."""
        waiting = [each for each in self.all if not each.started]
        if not waiting:
            return []
        remote = self.open_remote
        connecting = sum(not each.greeted and each.parent is None for each in remote)
        found = []
        for connection in waiting:
            if connection.parent is not None:
                if not connection.parent.greeted:
                    continue
            elif connection.starter.is_limited:
                if connecting >= CONNECTING:
                    continue
                connecting += 1
            found.append(connection)
        return found

    def start_directly(self, connection: AgentConnection) -> None:
        """Let the launcher start an agent that another agent has failed to start."""
        self.open.discard(connection)
        connection.start_directly()

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
        """Tell the agents on other hosts that this process will send no pings for a while. An agent gets this after
        the agents that it has started, since their frames are signs of life for it, too."""
        for connection in sorted(self.all, key=lambda each: -each.depth):
            if not connection.host.is_local:
                connection.send(agent.SUSPENDED)

    @contextlib.contextmanager
    def pinged(self) -> Iterator[None]:
        """Ping other hosts from a thread, even while this process is stuck writing a log to a slow disk."""
        over = threading.Event()

        def ping() -> None:
            while not over.wait(self._ping_seconds):
                for connection in list(self.all):
                    if not connection.host.is_local:
                        # The loop finds the failure when it reads.
                        with contextlib.suppress(Exception):
                            connection.ping()

        thread = threading.Thread(target=ping, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
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
        writable: dict[int, PipeLink] = {}
        for connection in self.open:
            link = connection.link
            if not isinstance(link, PipeLink):
                continue  # its bytes arrive through the connection to another agent
            readable[link.stdout.fileno()] = connection, False
            if link.stderr is not None:
                readable[link.stderr.fileno()] = connection, True
            if link.wants_write:
                writable[link.stdin.fileno()] = link
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

    def cause_of_silence(self, connection: AgentConnection, now: float) -> AgentConnection:
        """The agent that is lost if a connection is silent: the first one on the way there that has been silent, too.
        Whatever arrives from an agent is a sign of life of those before it, which therefore reach a limit later."""
        limit = self.quiet_seconds - 1.5 * self._ping_seconds
        way = [connection]
        while (parent := way[-1].parent) is not None:
            way.append(parent)
        return next((each for each in reversed(way) if now - each.heard > limit), connection)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self, connection: AgentConnection) -> list[AgentConnection]:
        """Stop waiting for an agent and those that are reached through it. On other hosts, they end all their processes
        themselves as soon as they notice. Returns all these connections."""
        dropped = [connection, *connection.beyond]
        self.open.difference_update(dropped)
        connection.end(0.0)
        return dropped

    def give_up(self, connection: AgentConnection) -> None:
        """Forget an agent, and end what has started it in a thread: a scheduler may wait for a host that does not
        answer. It starts no other agent."""
        self.drop(connection)
        self.all.remove(connection)
        threading.Thread(target=connection.starter.end, args=(0.0,), daemon=True).start()

    def finished(self, connection: AgentConnection) -> None:
        """Record that an agent has ended all its processes, and its connections to other agents."""
        self.open.difference_update([connection, *connection.beyond])

    def close(self, seconds: float) -> None:
        """Close all connections and wait up to ``seconds`` for each agent to end."""
        for connection in self.all:
            if connection.parent is None:  # an agent closes those that it has started
                connection.close()
        for connection in self.all:
            if connection.parent is None:
                connection.end(seconds)
        until = time.monotonic() + seconds
        for starter in {connection.starter for connection in self.all}:
            starter.end(max(until - time.monotonic(), 0.0))


def _empty(wakeup: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(wakeup, 4096)
