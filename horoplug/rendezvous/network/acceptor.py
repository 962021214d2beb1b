"""How every listener of this package accepts connections and treats those that have not authenticated yet.

- Above a limit, the oldest connection of the source that has the most is dropped: a host that opens connections and
  stays silent displaces its own connections, not those of other hosts.
- A connection that does not authenticate in time is dropped.
- A lack of descriptors, memory or threads costs at most one connection. The listener goes on."""

from __future__ import annotations

import errno
import math
import socket
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from horoplug.base import descriptors
from horoplug.rendezvous.network.peer_user import peer_user

_Connection = TypeVar("_Connection", bound=Hashable)

_AT_ONCE = 64  # connections that are accepted before others are served
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
_PAUSE = 0.01  # seconds, in a shortage
_GRACE = 1.0  # seconds that every connection has to authenticate in a shortage


class Acceptor(Generic[_Connection]):
    """Accepts connections for an event loop, which calls :meth:`accept` when a listener is readable and :meth:`expire`
    at :meth:`due`. It knows the connections that have not authenticated."""

    def __init__(
        self,
        admit: Callable[[socket.socket, str, Hashable], _Connection | None],
        drop: Callable[[_Connection, str], None],
        complain: Callable[[str], None],
        *,
        most: Callable[[], int],
        seconds: float,
    ) -> None:
        """``admit(socket, label, source)``: make a connection from a nonblocking socket, and watch it as its last
        action; None: the socket is closed. ``drop(connection, reason)``: close a connection. ``complain``: log a line.
        ``most``: the limit for connections that have not authenticated; ``seconds``: their time limit."""
        self._admit = admit
        self._drop = drop
        self._complain = complain
        self._most = most
        self._seconds = seconds
        # When each connection was accepted, oldest first; and the same connections by their source.
        self._since: dict[_Connection, float] = {}
        self._sources: dict[_Connection, Hashable] = {}
        self._by_source: dict[Hashable, dict[_Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def accept(self, listener: socket.socket) -> None:
        """Accept what waits at a nonblocking listener. Raises nothing."""
        for _ in range(_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SHORTAGES and not self._make_room(error):
                    return
                if error.errno in _CLOSED:
                    return
                continue  # the client has closed the connection
            self._take(sock, address)

    def _take(self, sock: socket.socket, address: tuple[str, int] | str) -> None:
        label, source = _origin(sock, address)
        try:
            sock.setblocking(False)
            connection = self._admit(sock, label, source)
        except Exception as error:
            sock.close()
            reason = descriptors.reason(error) if isinstance(error, OSError) else repr(error)
            self._complain(f"{label} could not be served: {reason}")
            return
        if connection is None:
            sock.close()
            return
        self._since[connection] = time.monotonic()
        self._sources[connection] = source
        self._by_source.setdefault(source, {})[connection] = None
        if len(self) > self._most():
            self._remove(self._least_deserving(), "was dropped: too many connections at once")

    def discard(self, connection: _Connection) -> None:
        """A connection has authenticated or has ended. Idempotent."""
        if self._since.pop(connection, None) is None:
            return
        source = self._sources.pop(connection)
        del self._by_source[source][connection]
        if not self._by_source[source]:
            del self._by_source[source]

    def due(self) -> float:
        """The next time limit of a connection; infinite without one."""
        return next(iter(self._since.values()), math.inf) + self._seconds

    def expire(self) -> None:
        """Drop the connections that have not authenticated in time."""
        while self.due() <= time.monotonic():
            reason = f"did not authenticate within {self._seconds:g} s"
            self._remove(next(iter(self._since)), reason)

    def _make_room(self, error: OSError) -> bool:
        """A shortage: drop a connection that has had time to authenticate. Returns whether there was one."""
        if self._since:
            dropped = self._least_deserving()
            if self._since[dropped] + _GRACE < time.monotonic():
                self._remove(dropped, f"was dropped: {descriptors.reason(error)}")
                return True
        # Connections wait in the kernel until something is free.
        self._complain(f"cannot accept connections: {descriptors.reason(error)}")
        time.sleep(_PAUSE)
        return False

    def _least_deserving(self) -> _Connection:
        busiest: dict[_Connection, None] = max(self._by_source.values(), key=len)
        return next(iter(busiest))

    def _remove(self, connection: _Connection, reason: str) -> None:
        self.discard(connection)
        self._drop(connection, reason)


def _origin(sock: socket.socket, address: tuple[str, int] | str) -> tuple[str, Hashable]:
    """How messages call the process at the other end, and what identifies it: its address or, on this host, its
    user."""
    if sock.family == socket.AF_UNIX:
        return "a process on this host", peer_user(sock)
    return f"{address[0]}:{address[1]}", address[0]
