"""The event loop in which one rank connects to the ranks below it and accepts connections from the ranks above it.

A foreign process that connects to a listener does not disturb other connections: each incoming connection has a short
deadline, their number is limited, and all of them advance concurrently. If a connection that this rank makes breaks,
the rank retries for a moment, since the peer may have been too busy, and then raises an error that names the peer. If a
process that has not proved to know the secret answers in the peer's place, the rank retries until its deadline."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import selectors
import socket
import time

from horoplug.base import descriptors
from horoplug.base.errors import AuthenticationError, PeerLostError, ProtocolError
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection, Refusal, Stage
from horoplug.rendezvous.network.auth import least_deserving
from horoplug.rendezvous.network.peer_user import is_own_user, peer_user
from horoplug.rendezvous.store.client import StoreClient

_INCOMING_SECONDS = 5.0  # limit for authentication and hello on an accepted connection
_SPARE_INCOMING = 64  # unfinished incoming connections allowed beyond those expected
_RETRY_PAUSE = 0.02
_REJECTED_PAUSE = 0.2
_RETRY_SECONDS = 1.0
_LOGGED = 10
_WRONG_USER = (
    "in the place of rank {}, a process of user {} listens, which is not the user of this job"
)
_BUFFER_BYTES = 1073741824

Key = tuple[int, int]
"""Identifies a connection: the rank at its other end, and the lane."""

_log = logging.getLogger("horoplug")


def unix_listener(size: int) -> tuple[str, socket.socket]:
    """Listen on a random name in the abstract namespace. Returns the name, without its leading zero byte, and the
    nonblocking listener."""
    name = f"horoplug-{secrets.token_hex(12)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind("\0" + name)
        sock.listen(size + _SPARE_INCOMING)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return name, sock


def tcp_listener(address: str, connections: int) -> socket.socket:
    """Listen on a free port of ``address`` only, with a backlog for ``connections`` at once. Nonblocking."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.create_server((address, 0), family=family, backlog=connections + _SPARE_INCOMING)
    sock.setblocking(False)
    return sock


def tune_tcp(sock: socket.socket, data_timeout: float) -> None:
    """Set the socket options of a connection between ranks.

    ``data_timeout``: seconds without an acknowledgement after which the kernel breaks the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A host that vanishes silently is noticed after data_timeout, whether or not there is data to send.
    seconds = max(int(data_timeout), 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(seconds // 3, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(seconds // 6, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
    # A fixed buffer size turns the kernel's autotuning off. It helps only if it exceeds the largest size of autotuning.
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _kernel_limit(name) >= _BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _kernel_limit(name: str) -> int:
    """Bytes that a socket buffer may have; 0 if unknown."""
    try:
        with open(f"/proc/sys/net/core/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


class Connector:
    """Makes the connections of one rank. Owns their sockets until :meth:`detach`."""

    def __init__(self, me: Identity, deadline: float) -> None:
        self._me = me
        self._deadline = deadline
        self._data_timeout = 30.0
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._pending: dict[PeerConnection, None] = {}  # not ready yet
        self._incoming: dict[PeerConnection, None] = {}  # those that were accepted, oldest first
        self._ready: dict[Key, PeerConnection] = {}
        self._streams = 1  # number of lanes to each rank on another host
        self._addresses: dict[int, tuple[str, int] | str] = {}
        self._expected = 0  # number of connections
        self._local: set[int] = set()
        self._retries: dict[Key, float] = {}  # time of the next attempt
        self._failing: dict[Key, float] = {}  # time of the first failure
        self.rejections: dict[Key, AuthenticationError] = {}
        """The last failures to authenticate lower ranks that are not connected yet."""
        self._complaints = 0
        self._store_watched = False

    def listen(self, listener: socket.socket, data_timeout: float = 30.0) -> None:
        """Take ownership of a listener. Connections are accepted from the first :meth:`run_once` on."""
        self._listeners.append(listener)
        self._data_timeout = data_timeout
        self._selector.register(listener, selectors.EVENT_READ)

    def connect_to(
        self, addresses: dict[int, tuple[str, int] | str], local: set[int], streams: int = 1
    ) -> None:
        """Start to connect to the lower ranks, and accept the higher ones from now on.

        ``addresses``: where each other rank listens; ``local``: the ranks on this host; ``streams``: number of
        connections to each rank on another host."""
        self._addresses = addresses
        self._local = local
        self._streams = streams
        self._expected = sum(map(self._lane_count, addresses))
        for rank in sorted(addresses):
            if rank < self._me.rank:
                for lane in range(self._lane_count(rank)):
                    self._dial((rank, lane))

    def _lane_count(self, rank: int) -> int:
        return 1 if rank in self._local else self._streams

    def _is_rank_connected(self, rank: int) -> bool:
        return all((rank, lane) in self._ready for lane in range(self._lane_count(rank)))

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected yet."""
        return sorted(rank for rank in self._addresses if not self._is_rank_connected(rank))

    @property
    def done(self) -> bool:
        """Whether all ranks are connected."""
        return len(self._ready) == self._expected

    # ---- the event loop ----------------------------------------------------------------------------------------------

    def run_once(self, store: StoreClient) -> None:
        """Wait for events on the connections or the store, and handle those on the connections.

        Errors: PeerLostError or ProtocolError about a rank that this one connects to."""
        if not self._store_watched:
            self._store_watched = True
            self._selector.register(store, selectors.EVENT_READ)
        for key, _ in self._selector.select(self._timeout()):
            if isinstance(key.data, PeerConnection):
                self._advance(key.data)
            elif key.fileobj is not store and isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        now = time.monotonic()
        while self._incoming and (oldest := next(iter(self._incoming))).deadline <= now:
            self._complain(f"{oldest.label} was too slow to identify itself")
            self._drop(oldest)
        for due in [due for due, when in self._retries.items() if when <= now]:
            del self._retries[due]
            self._dial(due)

    def _timeout(self) -> float:
        """Seconds until the next deadline. The caller of the loop enforces the deadline for all connections."""
        due = [self._deadline, *self._retries.values()]
        if self._incoming:
            due.append(next(iter(self._incoming)).deadline)
        return max(min(due) - time.monotonic(), 0.0) + 0.001

    def _dial(self, key: Key) -> None:
        """Start to connect to a lower rank."""
        rank, lane = key
        address = self._addresses[rank]
        local = isinstance(address, str)
        family = socket.AF_UNIX
        if not isinstance(address, str):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        connection = PeerConnection(
            sock,
            self._me,
            target=rank,
            deadline=self._deadline,
            admit=self._admit,
            label=f"rank {rank}",
            lane=lane,
        )
        try:
            if not local:
                tune_tcp(sock, self._data_timeout)
            error = sock.connect_ex("\0" + address if isinstance(address, str) else address)
            if error == errno.EAGAIN:  # a Unix listener's backlog is full
                sock.close()
                self._retries[key] = time.monotonic() + _RETRY_PAUSE
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

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._complain(f"cannot accept connections: {descriptors.reason(error)}")
                time.sleep(0.01)
                return
            sock.setblocking(False)
            source: str | int
            if sock.family == socket.AF_UNIX:
                if not is_own_user(sock):
                    self._complain(f"a process of user {peer_user(sock)}, not of the job's user")
                    sock.close()
                    continue
                label, source = "a process on this host", peer_user(sock)
            else:
                source = address[0]
                label = f"{address[0]}:{address[1]}"
                tune_tcp(sock, self._data_timeout)
            connection = PeerConnection(
                sock,
                self._me,
                target=None,
                deadline=time.monotonic() + _INCOMING_SECONDS,
                admit=self._admit,
                label=label,
                source=source,
            )
            self._watch(connection)
            if len(self._incoming) > self._me.size * self._streams + _SPARE_INCOMING:
                dropped = least_deserving({other: other.source for other in self._incoming})
                self._complain(f"{dropped.label} was dropped: too many connections at once")
                self._drop(dropped)

    def _advance(self, connection: PeerConnection) -> None:
        if connection not in self._pending:
            return  # dropped earlier in the same run_once()
        try:
            if connection.stage is Stage.CONNECTING and not self._is_connected(connection):
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
            if connection.target is not None:
                raise
            self._complain(str(error))
        except OSError as error:
            self._drop(connection)
            if connection.target is not None:
                self._failed((connection.target, connection.lane), error)
        else:
            if connection.stage is Stage.READY:
                self._complete(connection)
            else:
                self._selector.modify(connection.sock, _events(connection), connection)

    @staticmethod
    def _is_connected(connection: PeerConnection) -> bool:
        """Whether a connection attempt has ended, in success or failure."""
        try:
            connection.sock.getpeername()
        except OSError:
            return connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return True

    def _complete(self, connection: PeerConnection) -> None:
        self._forget(connection)
        assert connection.rank is not None
        self._ready[connection.rank, connection.lane] = connection
        self._failing.pop((connection.rank, connection.lane), None)
        self.rejections.pop((connection.rank, connection.lane), None)

    def _admit(self, rank: int, lane: int, local: bool) -> Refusal | None:
        """Why an incoming connection has to be refused; None: it is accepted."""
        if rank <= self._me.rank or rank not in self._addresses or local != (rank in self._local):
            return Refusal.RANK
        if lane >= self._lane_count(rank):
            return Refusal.LANE
        return Refusal.DUPLICATE if (rank, lane) in self._ready else None

    def _rejected(self, key: Key, error: AuthenticationError) -> None:
        """A process that has not proved to be the lower rank has answered in its place. The rank itself may still
        answer, so try again until the deadline."""
        self._complain(str(error))
        self.rejections[key] = error
        self._retries[key] = time.monotonic() + _REJECTED_PAUSE

    def _failed(self, key: Key, error: OSError) -> None:
        """A connection to a lower rank failed: retry for a moment, then raise PeerLostError."""
        now, rank = time.monotonic(), key[0]
        if now - self._failing.setdefault(key, now) > _RETRY_SECONDS:
            raise PeerLostError(
                rank,
                f"rank {rank} cannot be connected to: {error.strerror}; it has ended or failed",
            )
        self._retries[key] = now + _RETRY_PAUSE

    def _watch(self, connection: PeerConnection) -> None:
        self._pending[connection] = None
        if connection.target is None:
            self._incoming[connection] = None
        self._selector.register(connection.sock, _events(connection), connection)

    def _drop(self, connection: PeerConnection) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: PeerConnection) -> None:
        self._selector.unregister(connection.sock)
        del self._pending[connection]
        self._incoming.pop(connection, None)

    def _complain(self, text: str) -> None:
        self._complaints += 1
        if self._complaints <= _LOGGED:
            more = "; further ones are not logged" if self._complaints == _LOGGED else ""
            _log.warning("rank %d: a connection was rejected: %s%s", self._me.rank, text, more)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """Close the listeners and all connections that are not ready."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        for connection in list(self._pending):
            self._drop(connection)

    def stream(self, rank: int) -> socket.socket:
        """The socket of the first connection to a rank. It stays owned by this object."""
        return self._ready[rank, 0].sock

    def local_connections(self) -> dict[int, PeerConnection]:
        """The connections to ranks on this host, once they are ready. They stay owned by this object."""
        return {rank: self._ready[rank, 0] for rank in self._addresses if rank in self._local}

    def data_keys(self, rank: int) -> bytes:
        """The concatenated keys of all connections to a rank, by lane, which encrypt what the core sends and receives;
        empty if the connections are not encrypted."""
        return b"".join(
            self._ready[rank, lane].data_keys() for lane in range(self._lane_count(rank))
        )

    def detach(self) -> dict[Key, tuple[int, int, int]]:
        """Hand over the (stream, segment, doorbell) descriptors of all connections, by rank and lane."""
        detached = {key: connection.detach() for key, connection in self._ready.items()}
        self._ready.clear()
        return detached

    def close(self) -> None:
        """Close everything that was not detached. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in (*self._pending, *self._ready.values()):
            connection.close()
        self._pending.clear()
        self._incoming.clear()
        self._ready.clear()
        self._selector.close()


def _events(connection: PeerConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
