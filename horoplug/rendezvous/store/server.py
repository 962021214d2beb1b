"""The store's server: one thread, one selector, any number of clients.

A misbehaving client loses at most its own connection: nothing is parsed before it has authenticated, every buffer has a
limit, and clients that do not authenticate in time or do not read their answers are dropped."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import selectors
import socket
import time
from collections.abc import Callable, Hashable

from horoplug.base import descriptors, threads
from horoplug.base.errors import AuthenticationError, ProtocolError, TamperedMessageError
from horoplug.rendezvous.network.acceptor import Acceptor
from horoplug.rendezvous.network.addresses import loopback
from horoplug.rendezvous.network.auth import FRAME_BYTES, Encryption, Handshake, Role
from horoplug.rendezvous.network.fork import close_in_children
from horoplug.rendezvous.network.messages import MessageChannel
from horoplug.rendezvous.store import protocol
from horoplug.rendezvous.store.state import StoreState

AUTH_SECONDS = 10.0
BACKLOG = 65535  # the kernel takes less if net.core.somaxconn is lower
MAX_UNAUTHENTICATED = 16384
_MIN_UNAUTHENTICATED = 256
MAX_OUTPUT = 2 * protocol.MAX_REPLY  # bytes queued for a client before it is dropped
_LONGEST_WAIT = 3600.0  # seconds
_LOGGED = 20  # number of warnings about clients; a flood of garbage must not fill a disk

_log = logging.getLogger("horoplug")


@dataclasses.dataclass(eq=False)
class _Connection:
    sock: socket.socket
    peer: str
    handshake: Handshake | None  # None: authenticated
    channel: MessageChannel | None = None  # once authenticated
    inbox: bytearray = dataclasses.field(default_factory=bytearray)
    outbox: bytearray = dataclasses.field(default_factory=bytearray)
    events: int = selectors.EVENT_READ
    open: bool = True


class StoreServer:
    """Serves a store on one address until closed. A context manager."""

    def __init__(
        self,
        secret: bytes,
        address: str | None = None,
        port: int = 0,
        *,
        auth_seconds: float = AUTH_SECONDS,
    ) -> None:
        """Listen on ``address``, by default that of loopback, and serve. Port 0 takes a free port; :attr:`address` has
        the result.

        ``auth_seconds``: limit for a client's authentication. Errors: OSError if the address cannot be bound."""
        # All ranks may connect at once. Unauthenticated connections may take half of the descriptors.
        for_strangers = max(descriptors.limit() // 2, _MIN_UNAUTHENTICATED)
        self._secret = secret
        self._complaints = 0
        self._connections: dict[_Connection, None] = {}
        self._acceptor: Acceptor[_Connection] = Acceptor(
            *(self._admit, self._drop, lambda text: self._complain(None, text)),
            most=lambda: min(for_strangers, MAX_UNAUTHENTICATED),
            seconds=auth_seconds,
        )
        self._state = StoreState(self._reply, self._on_set)
        # Calls of other threads for the server thread.
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._watched: tuple[bytes, Callable[[bytes], object]] | None = None
        self._stop = False
        address = loopback() if address is None else address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, port), family=family, backlog=BACKLOG, reuse_port=False
        )
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._owner = os.getpid()
        close_in_children(self)
        self._thread = threads.start(self._run, name="horoplug-store")

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and close every connection. Idempotent."""
        if self._stop or os.getpid() != self._owner:
            return
        self._stop = True
        self._wake()
        self._thread.join()
        self.forget()

    def wait_for_clients(self, seconds: float) -> None:
        """Wait until every client has closed its connection, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self._stop and time.monotonic() < deadline:
            if all(connection.handshake is not None for connection in list(self._connections)):
                return
            time.sleep(0.01)

    def forget(self) -> None:
        """Close this process's descriptors silently (for a forked child, see fork.py)."""
        self._stop = True
        for sock in [c.sock for c in self._connections]:
            sock.close()
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def mark_lost(self, rank: int, text: str) -> None:
        """Fail all waits for this rank. For the launcher, which sees a rank die before its connection ends.

        ``text``: the reason, for the error message."""
        self._call(lambda: self._state.lost(rank, text))

    def set(self, key: str, value: bytes) -> None:
        """Set a key, soon."""
        self._call(lambda: self._state.set(key.encode(), value))

    def watch(self, prefix: str, follower: Callable[[bytes], object]) -> None:
        """Call ``follower``, in the server's thread, with each value that a client sets for a key with this prefix."""
        self._watched = prefix.encode(), follower

    def departures(self) -> list[int]:
        """Ranks in the order in which they left or were lost."""
        return list(self._state.departures)

    def present(self) -> int:
        """Number of registered ranks."""
        return self._state.present

    def value(self, key: str) -> bytes | None:
        """The current value of a key; None if it is not set."""
        return self._state.value(key.encode())

    def _on_set(self, key: bytes, value: bytes) -> None:
        if self._watched is not None and key.startswith(self._watched[0]):
            self._watched[1](value)

    def _call(self, function: Callable[[], object]) -> None:
        self._calls.append(function)
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"w")
        except BlockingIOError:
            pass  # the pipe is full, so the thread will wake up
        except OSError:
            pass  # closed

    # ---- the server thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            try:
                self._run_once()
            except Exception:
                # A bug in one request must not end the rendezvous of the whole job.
                _log.exception("rendezvous server: unexpected error")
                time.sleep(0.1)

    def _run_once(self) -> None:
        for key, events in self._selector.select(self._timeout()):
            if isinstance(key.data, _Connection):
                self._serve(key.data, events)
            elif key.data is not None:
                self._acceptor.accept(self._listener)
            else:
                self._wake_in.recv(4096)
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        self._state.expire(now)
        self._acceptor.expire()

    def _timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        now = time.monotonic()
        waits = self._state.expire(now)
        due = min(math.inf if waits is None else waits, self._acceptor.due())
        # Waits for a month, which a client may ask for, are more than epoll accepts.
        return None if due == math.inf else min(max(due - now, 0.0) + 0.001, _LONGEST_WAIT)

    def _admit(self, sock: socket.socket, peer: str, source: Hashable) -> _Connection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Serve encrypted and plain clients, so that a client with the wrong setting learns what other ranks use.
        context, encryption = protocol.AUTH_CONTEXT, Encryption.AS_CLIENT
        handshake = Handshake(self._secret, Role.SERVER, context, peer, encryption)
        connection = _Connection(sock, peer, handshake)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._connections[connection] = None
        return connection

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._complain(connection, reason, close=True)

    def _serve(self, connection: _Connection, events: int) -> None:
        if not connection.open:
            return  # closed by an earlier event of the same _run_once()
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection.open:
                data = connection.sock.recv(1 << 16)
                if not data:
                    self._close(connection)
                    return
                connection.inbox += data
                self._parse(connection)
        except TamperedMessageError as error:
            self._complain(None, str(error))
            self._close(connection, "was disconnected: a message from it was changed on its way")
        except AuthenticationError as error:
            if connection.handshake is not None and connection.handshake.farewell:
                self._send_last(connection, connection.handshake.farewell)
            self._complain(None, str(error))
            self._close(connection)
        except ProtocolError as error:
            self._complain(connection, f"was disconnected: {error}", close=True)
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _parse(self, connection: _Connection) -> None:
        inbox = connection.inbox
        while connection.open:
            if connection.handshake is not None:
                if len(inbox) < FRAME_BYTES:
                    return
                answer = connection.handshake.feed(bytes(inbox[:FRAME_BYTES]))
                del inbox[:FRAME_BYTES]
                self._queue(connection, answer)
                if connection.handshake.done:
                    connection.channel = connection.handshake.channel()
                    connection.handshake = None
                    self._acceptor.discard(connection)
                continue
            assert connection.channel is not None
            message = connection.channel.take(inbox, protocol.MAX_REQUEST)
            if message is None:
                return
            self._state.request(connection, *protocol.unpack(message), time.monotonic())

    # ---- output ------------------------------------------------------------------------------------------------------

    def _reply(self, session: Hashable, message: bytes) -> None:
        assert isinstance(session, _Connection)
        assert session.channel is not None
        if session.open:
            self._queue(session, session.channel.seal(message))

    def _queue(self, connection: _Connection, data: bytes) -> None:
        connection.outbox += data
        if len(connection.outbox) > MAX_OUTPUT:
            self._complain(connection, "was disconnected: it does not read its answers", close=True)
            return
        try:
            self._flush(connection)
        except OSError:
            # The end of the connection is noticed when it is read. Closing here could modify the
            # collection of waiting sessions while a caller iterates over it.
            connection.outbox.clear()

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.outbox:
                del connection.outbox[: connection.sock.send(connection.outbox)]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        if wanted != connection.events:
            connection.events = wanted
            self._selector.modify(connection.sock, wanted, connection)

    def _send_last(self, connection: _Connection, data: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.sock.send(data)

    def _complain(self, connection: _Connection | None, text: str, close: bool = False) -> None:
        self._complaints += 1
        if self._complaints <= _LOGGED:
            who = f"{connection.peer} " if connection is not None else ""
            more = "; further ones are not logged" if self._complaints == _LOGGED else ""
            _log.warning("rendezvous server: %s%s%s", who, text, more)
        if close and connection is not None:
            self._close(connection)

    def _close(
        self, connection: _Connection, reason: str = "ended without leaving the job"
    ) -> None:
        if not connection.open:
            return
        connection.open = False
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._connections.pop(connection, None)
        self._acceptor.discard(connection)
        self._state.closed(connection, reason)
