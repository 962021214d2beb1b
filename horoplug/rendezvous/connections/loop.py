"""The event loop that dials ranks, accepts connections from ranks, and lets both authenticate.

A foreign process that connects to a listener does not disturb other connections: each incoming connection has a short
deadline, their number is limited, and all of them advance concurrently. What a finished or failed connection means is
decided by the subclasses: :class:`.connector.Connector` while a job starts, and
:class:`.on_demand_connector.OnDemandConnector` later."""

from __future__ import annotations

import abc
import errno
import functools
import logging
import math
import os
import selectors
import socket
import time
from collections.abc import Callable, Hashable

from horoplug.base.errors import AuthenticationError, ProtocolError
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection, Refusal, Stage
from horoplug.rendezvous.connections.sockets import Address, tune_tcp
from horoplug.rendezvous.network.acceptor import Acceptor
from horoplug.rendezvous.network.peer_user import is_own_user, peer_user

_INCOMING_SECONDS = 5.0  # limit for authentication and hello on an accepted connection
RETRY_PAUSE = 0.02  # seconds until a connection that has failed is tried again
REJECTED_PAUSE = 0.2  # the same if the process that answers has not proved to be the rank
_LOGGED = 10
_WRONG_USER = (
    "in the place of rank {}, a process of user {} listens, which is not the user of this job"
)

Key = tuple[int, int]
"""Identifies a connection: the rank at its other end, and the lane."""

_log = logging.getLogger("horoplug")


class ConnectionLoop(abc.ABC):
    """Makes connections of one rank. Owns their sockets, and the listeners."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._data_timeout = 30.0
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._pending: dict[PeerConnection, None] = {}  # not ready yet
        self._outgoing: dict[Key, PeerConnection] = {}  # those that this rank makes
        self._ready: dict[Key, PeerConnection] = {}
        self._addresses: dict[int, Address] = {}
        self._retries: dict[Key, float] = {}  # time of the next attempt
        self._complaints = 0
        # Of incoming connections that are not ready.
        self._acceptor: Acceptor[PeerConnection] = Acceptor(
            *(self._take, self._reject, self._complain),
            most=lambda: self._most_incoming,
            seconds=_INCOMING_SECONDS,
        )

    def listen(self, listener: socket.socket, data_timeout: float = 30.0) -> None:
        """Take ownership of a listener. Connections are accepted while the loop runs.

        ``data_timeout``: see :func:`.sockets.tune_tcp`."""
        self._listeners.append(listener)
        self._data_timeout = data_timeout
        self.watch(listener, functools.partial(self._acceptor.accept, listener))

    def watch(self, source: int | socket.socket, readable: Callable[[], None]) -> None:
        """Call a function in the loop whenever a descriptor is readable. The caller owns the descriptor."""
        self._selector.register(source, selectors.EVENT_READ, readable)

    # ---- decisions of the subclass -----------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _most_incoming(self) -> int:
        """The limit for unfinished incoming connections."""

    @abc.abstractmethod
    def _admit(self, rank: int, lane: int, local: bool) -> Refusal | None:
        """Why an incoming connection has to be refused; None: it is accepted."""

    @abc.abstractmethod
    def _complete(self, connection: PeerConnection) -> None:
        """A connection is ready. It is still watched."""

    @abc.abstractmethod
    def _rejected(self, key: Key, error: AuthenticationError) -> None:
        """A process that has not proved to be the rank has answered in its place. The rank itself may still answer."""

    @abc.abstractmethod
    def _failed(self, key: Key, error: OSError) -> None:
        """An attempt to connect to a rank has failed."""

    @abc.abstractmethod
    def _violated(self, connection: PeerConnection, error: ProtocolError) -> None:
        """A process that knows the secret has refused this rank, was refused, or has broken the protocol. The
        connection is closed."""

    # ---- the event loop ----------------------------------------------------------------------------------------------

    def _run_once(self, until: float) -> None:
        """Wait for events until a time, and handle them."""
        seconds = None if until == math.inf else max(until - time.monotonic(), 0.0) + 0.001
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, PeerConnection):
                self._advance(key.data)
            elif key.data is not None:
                key.data()
        self._acceptor.expire()

    def _next_due(self) -> float:
        """The time of the next attempt or of the next deadline of an incoming connection; infinite without one."""
        return min([self._acceptor.due(), *self._retries.values()])

    def _take_due(self) -> list[Key]:
        """The connections to try again now."""
        now = time.monotonic()
        found = [key for key, when in self._retries.items() if when <= now]
        for key in found:
            del self._retries[key]
        return found

    def _dial(self, key: Key) -> None:
        """Start to connect to a rank. The subclass limits the time that this may take."""
        rank, lane = key
        address = self._addresses[rank]
        local = isinstance(address, str)
        family = socket.AF_UNIX
        if not isinstance(address, str):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        connection = PeerConnection(
            sock, self._me, target=rank, admit=self._admit, label=f"rank {rank}", lane=lane
        )
        try:
            if not local:
                tune_tcp(sock, self._data_timeout)
            error = sock.connect_ex("\0" + address if isinstance(address, str) else address)
            if error == errno.EAGAIN and local:  # the listener's backlog is full
                sock.close()
                self._retries[key] = time.monotonic() + RETRY_PAUSE
                return
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
            if local and error == 0 and not is_own_user(sock):
                self._rejected(key, AuthenticationError(_WRONG_USER.format(rank, peer_user(sock))))
                sock.close()
                return
            if error == 0:
                connection.connected()
        except OSError as error:
            sock.close()
            self._failed(key, error)
            return
        self._watch(connection)
        self._advance(connection)

    def _take(self, sock: socket.socket, label: str, source: Hashable) -> PeerConnection | None:
        """Begin to identify the process at the other end of a connection that was accepted."""
        if sock.family != socket.AF_UNIX:
            tune_tcp(sock, self._data_timeout)
        elif not is_own_user(sock):
            self._complain(f"a process of user {peer_user(sock)}, not of the job's user")
            return None
        connection = PeerConnection(sock, self._me, target=None, admit=self._admit, label=label)
        self._watch(connection)
        return connection

    def _reject(self, connection: PeerConnection, reason: str) -> None:
        self._complain(f"{connection.label} {reason}")
        self._drop(connection)

    def _advance(self, connection: PeerConnection) -> None:
        if connection not in self._pending:
            return  # dropped earlier in the same run_once()
        try:
            if connection.stage is Stage.CONNECTING and not _is_connected(connection):
                return
            connection.advance()
        except AuthenticationError as error:
            self._drop(connection)
            if connection.target is None:
                self._complain(str(error))
            else:
                self._rejected((connection.target, connection.lane), error)
        except ProtocolError as error:
            self._drop(connection)
            self._violated(connection, error)
        except OSError as error:
            self._drop(connection)
            if connection.target is not None:
                self._failed((connection.target, connection.lane), error)
        else:
            if connection.stage is Stage.READY:
                self._complete(connection)
            else:
                self._selector.modify(connection.sock, _events(connection), connection)

    def _watch(self, connection: PeerConnection) -> None:
        self._selector.register(connection.sock, _events(connection), connection)
        self._pending[connection] = None
        if connection.target is not None:
            self._outgoing[connection.target, connection.lane] = connection

    def _drop(self, connection: PeerConnection) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: PeerConnection) -> None:
        self._selector.unregister(connection.sock)
        del self._pending[connection]
        if connection.target is None:
            self._acceptor.discard(connection)
        else:
            self._outgoing.pop((connection.target, connection.lane), None)

    def _complain(self, text: str) -> None:
        self._complaints += 1
        if self._complaints <= _LOGGED:
            more = "; further ones are not logged" if self._complaints == _LOGGED else ""
            _log.warning("rank %d: a connection was rejected: %s%s", self._me.rank, text, more)

    def close(self) -> None:
        """Close everything that was not handed over. Idempotent. Changes no state that a forked child shares with its
        parent."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in (*self._pending, *self._ready.values()):
            connection.close()
        self._pending.clear()
        self._outgoing.clear()
        self._ready.clear()
        self._retries.clear()
        self._selector.close()


def _is_connected(connection: PeerConnection) -> bool:
    """Whether a connection attempt has succeeded. Errors: OSError if it has failed."""
    try:
        connection.sock.getpeername()
    except OSError:
        # The kernel reports the error only once.
        error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error)) from None
        return False
    return True


def _events(connection: PeerConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
