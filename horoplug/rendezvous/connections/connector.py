"""The event loop in which one rank connects to the ranks below it and accepts the ranks above it.

What a stranger does on a listener costs at most its own connection: each has a short deadline of its own, their number
is limited, and all of them advance side by side. A connection that this rank makes itself is tried again for a moment
when it breaks, since the other side may have been too busy, and is then an error that names the rank."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import selectors
import socket
import time

from horoplug.base.errors import AuthenticationError, PeerLostError, ProtocolError
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection, Refusal, Stage
from horoplug.rendezvous.store.client import StoreClient

_INCOMING_SECONDS = 5.0  # an accepted connection must be ready after this long
_SPARE_INCOMING = 64  # connections in the making beyond one per rank
_RETRY_PAUSE = 0.02
_RETRY_SECONDS = 1.0
_LOGGED = 10
_BUFFER_BYTES = 1073741824

Key = tuple[int, int]
"""A connection: the rank at its other end, and its lane."""

_log = logging.getLogger("horoplug")


def unix_listener(size: int) -> tuple[str, socket.socket]:
    """A listener on a fresh name in the abstract namespace, and the name (without its leading zero byte)."""
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
    """A listener on a free port of ``address`` and of no other interface, for so many at once."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.create_server((address, 0), family=family, backlog=connections + _SPARE_INCOMING)
    sock.setblocking(False)
    return sock


def tune_tcp(sock: socket.socket, data_timeout: float) -> None:
    """Options of a connection between ranks. ``data_timeout``: seconds without an acknowledgement until it breaks."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A host that vanished without a word is noticed after data_timeout, whether or not there is something to send.
    seconds = max(int(data_timeout), 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(seconds // 3, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(seconds // 6, 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
    # A fixed size switches the kernel's own tuning off, so it has to be larger than what is tuned to, or it does harm.
    for option, name in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _limit(name) >= _BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _limit(name: str) -> int:
    try:
        with open(f"/proc/sys/net/core/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


class Connector:
    """Makes the connections of one rank. Owns all its sockets until :meth:`detach`."""

    def __init__(self, me: Identity, deadline: float) -> None:
        self._me = me
        self._deadline = deadline
        self._data_timeout = 30.0
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._links: dict[PeerConnection, None] = {}  # in the making, oldest first
        self._ready: dict[Key, PeerConnection] = {}
        self._streams = 1  # lanes to a rank on another host
        self._addresses: dict[int, tuple[str, int] | str] = {}
        self._local: set[int] = set()
        self._retries: dict[Key, float] = {}  # when to try again
        self._failing: dict[Key, float] = {}  # when it first failed
        self._complaints = 0
        self._store_watched = False

    def listen(self, listener: socket.socket, data_timeout: float = 30.0) -> None:
        """Take over a listener; connections are accepted from the first :meth:`turn` on."""
        self._listeners.append(listener)
        self._data_timeout = data_timeout
        self._selector.register(listener, selectors.EVENT_READ)

    def expect(
        self, addresses: dict[int, tuple[str, int] | str], local: set[int], streams: int = 1
    ) -> None:
        """Where all other ranks listen, which of them are on this host, and how many connections there are to each of
        those that are not; starts connecting."""
        self._addresses = addresses
        self._local = local
        self._streams = streams
        for rank in sorted(addresses):
            if rank < self._me.rank:
                for lane in range(self._lanes(rank)):
                    self._dial((rank, lane))

    def _lanes(self, rank: int) -> int:
        return 1 if rank in self._local else self._streams

    def _complete_rank(self, rank: int) -> bool:
        return all((rank, lane) in self._ready for lane in range(self._lanes(rank)))

    @property
    def missing(self) -> list[int]:
        """Ranks that are not connected yet."""
        return sorted(rank for rank in self._addresses if not self._complete_rank(rank))

    @property
    def done(self) -> bool:
        """Whether all ranks are connected."""
        return len(self._ready) == sum(map(self._lanes, self._addresses))

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def turn(self, store: StoreClient) -> None:
        """Wait until something happens, here or in the store, and deal with it.

        Errors: PeerLostError, AuthenticationError or ProtocolError about a rank that this one connects to."""
        if not self._store_watched:
            self._store_watched = True
            self._selector.register(store, selectors.EVENT_READ)
        for key, _ in self._selector.select(self._patience()):
            if isinstance(key.data, PeerConnection):
                self._advance(key.data)
            elif key.fileobj is not store and isinstance(key.fileobj, socket.socket):
                self._accept(key.fileobj)
        now = time.monotonic()
        for link in [link for link in self._links if link.deadline <= now]:
            if link.target is None:
                self._complain(f"{link.label} was too slow to identify itself")
                self._drop(link)
        for due in [due for due, when in self._retries.items() if when <= now]:
            del self._retries[due]
            self._dial(due)

    def _patience(self) -> float:
        """Seconds until the next deadline; the loop's owner checks the whole mesh's, too."""
        due = [self._deadline + 1.0, *self._retries.values()]
        due += [link.deadline for link in self._links if link.target is None][:1]
        return max(min(due) - time.monotonic(), 0.0) + 0.001

    def _dial(self, key: Key) -> None:
        """Start to connect to a rank below."""
        rank, lane = key
        address = self._addresses[rank]
        local = isinstance(address, str)
        family = socket.AF_UNIX
        if not isinstance(address, str):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        link = PeerConnection(
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
            if error == 0:
                link.connected()
        except OSError as error:
            sock.close()
            self._failed(key, error)
            return
        self._watch(link)
        self._advance(link)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._complain(f"cannot accept connections: {error.strerror}")
                time.sleep(0.01)
                return
            sock.setblocking(False)
            if sock.family == socket.AF_UNIX:
                label = "a process on this host"
            else:
                label = f"{address[0]}:{address[1]}"
                tune_tcp(sock, self._data_timeout)
            link = PeerConnection(
                sock,
                self._me,
                target=None,
                deadline=time.monotonic() + _INCOMING_SECONDS,
                admit=self._admit,
                label=label,
            )
            self._watch(link)
            incoming = [other for other in self._links if other.target is None]
            if len(incoming) > self._me.size * self._streams + _SPARE_INCOMING:
                self._complain(f"{incoming[0].label} made way: too many connections at once")
                self._drop(incoming[0])

    def _advance(self, link: PeerConnection) -> None:
        if link not in self._links:
            return  # dropped earlier in this turn
        try:
            if link.stage is Stage.CONNECTING and not self._is_connected(link):
                return
            link.advance()
        except (AuthenticationError, ProtocolError) as error:
            self._drop(link)
            if link.target is not None:
                raise
            self._complain(str(error))
        except OSError as error:
            self._drop(link)
            if link.target is not None:
                self._failed((link.target, link.lane), error)
        else:
            if link.stage is Stage.READY:
                self._complete(link)
            else:
                self._selector.modify(link.sock, _events(link), link)

    @staticmethod
    def _is_connected(link: PeerConnection) -> bool:
        """Whether a connection in progress has been decided, well or badly."""
        try:
            link.sock.getpeername()
        except OSError:
            return link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return True

    def _complete(self, link: PeerConnection) -> None:
        self._selector.unregister(link.sock)
        del self._links[link]
        assert link.rank is not None
        self._ready[link.rank, link.lane] = link
        self._failing.pop((link.rank, link.lane), None)

    def _admit(self, rank: int, lane: int, local: bool) -> Refusal | None:
        """Judge a rank that has connected to this one."""
        if rank <= self._me.rank or rank not in self._addresses or local != (rank in self._local):
            return Refusal.RANK
        if lane >= self._lanes(rank):
            return Refusal.LANE
        return Refusal.DUPLICATE if (rank, lane) in self._ready else None

    def _failed(self, key: Key, error: OSError) -> None:
        """A connection to a rank below did not come about: try again, for a moment."""
        now, rank = time.monotonic(), key[0]
        if now - self._failing.setdefault(key, now) > _RETRY_SECONDS:
            raise PeerLostError(
                rank,
                f"rank {rank} cannot be connected to: {error.strerror}; it has ended or failed",
            )
        self._retries[key] = now + _RETRY_PAUSE

    def _watch(self, link: PeerConnection) -> None:
        self._links[link] = None
        self._selector.register(link.sock, _events(link), link)

    def _drop(self, link: PeerConnection) -> None:
        self._selector.unregister(link.sock)
        del self._links[link]
        link.close()

    def _complain(self, text: str) -> None:
        self._complaints += 1
        if self._complaints <= _LOGGED:
            more = "; further ones are not logged" if self._complaints == _LOGGED else ""
            _log.warning("rank %d: a connection was rejected: %s%s", self._me.rank, text, more)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def stop_listening(self) -> None:
        """Close the listeners and whatever is only half connected."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        for link in list(self._links):
            self._drop(link)

    def stream(self, rank: int) -> socket.socket:
        """The first connection to a rank, which stays this object's."""
        return self._ready[rank, 0].sock

    def detach(self) -> dict[Key, tuple[int, int, int]]:
        """(stream, segment, doorbell) descriptors by rank and lane; from now on the caller's."""
        detached = {key: link.detach() for key, link in self._ready.items()}
        self._ready.clear()
        return detached

    def close(self) -> None:
        """Close everything that was not detached. Idempotent."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for link in (*self._links, *self._ready.values()):
            link.close()
        self._links.clear()
        self._ready.clear()
        self._selector.close()


def _events(link: PeerConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)
