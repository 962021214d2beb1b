"""A server that authenticates its clients. One thread accepts connections and runs all handshakes, so that a connection
without the secret costs no thread; each authenticated connection has a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from horoplug.base import threads
from horoplug.base.errors import AuthenticationError, ProtocolError
from horoplug.rendezvous.network.acceptor import Acceptor
from horoplug.rendezvous.network.auth import FRAME_BYTES, Encryption, Handshake, Role
from horoplug.rendezvous.network.messages import MessageStream

MOST_UNAUTHENTICATED = 256
"""The limit for connections that have not authenticated, or twice the number of expected clients."""
_AUTH_SECONDS = 10.0
_LONGEST_WAIT = 3600.0
_LOGGED = 10

_log = logging.getLogger("horoplug")


def bind(address: str, port: int = 0) -> socket.socket:
    """A listening socket. ``port``: 0 takes a free one. Errors: OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


@dataclasses.dataclass(eq=False)
class _Stranger:
    """A connection that has not authenticated."""

    sock: socket.socket
    label: str
    handshake: Handshake
    inbox: bytes = b""


class Listener:
    """Accepts connections, and serves those that authenticate with the job's secret."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        secret: bytes,
        context: bytes,
        encryption: Encryption,
        expected: int,
        serve: Callable[[MessageStream], None],
        auth_seconds: float = _AUTH_SECONDS,
    ) -> None:
        """``sockets``: from :func:`bind`; ``context``: as in :class:`.auth.Handshake`; ``expected``: number of clients
        that may connect at once; ``serve``: is called with each authenticated connection, in a thread of its own, and
        the connection ends with the call, also if that raises OSError or ProtocolError; ``auth_seconds``: limit for the
        handshake. Errors: OSError."""
        self._sockets = sockets
        self._secret = secret
        self._context = context
        self._encryption = encryption
        self._on_connection = serve
        self._complaints = 0
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()  # those that have authenticated
        self._strangers: dict[_Stranger, None] = {}
        self._acceptor: Acceptor[_Stranger] = Acceptor(
            *(self._admit, self._drop, self._complain),
            most=lambda: max(MOST_UNAUTHENTICATED, 2 * expected),
            seconds=auth_seconds,
        )
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._wake, wake = (stack.enter_context(each) for each in socket.socketpair())
            self._selector.register(wake, selectors.EVENT_READ)
            for sock in sockets:
                stack.callback(sock.close)
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, sock)
            self._thread = threads.start(self._run, name="horoplug-listener")
            self._resources = stack.pop_all()

    def stop(self) -> None:
        """Accept no further connections. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"w")
        self._thread.join()
        with self._lock:
            self._resources.close()

    def close(self) -> None:
        """Accept no further connections, and end all connections."""
        self.stop()
        with self._lock:
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # ---- the thread that accepts -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self._run_once()
            except Exception:
                # What one connection causes must not end the listener.
                _log.exception("a listener of horoplug: unexpected error")
                time.sleep(0.1)
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.sock.close()

    def _run_once(self) -> None:
        seconds = min(max(self._acceptor.due() - time.monotonic(), 0.0) + 0.001, _LONGEST_WAIT)
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Stranger):
                self._advance(key.data)
            elif key.data is not None:
                self._acceptor.accept(key.data)
        self._acceptor.expire()

    def _admit(self, sock: socket.socket, label: str, source: Hashable) -> _Stranger:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = Handshake(self._secret, Role.SERVER, self._context, label, self._encryption)
        stranger = _Stranger(sock, label, handshake)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._strangers[stranger] = None
        return stranger

    def _advance(self, stranger: _Stranger) -> None:
        if stranger not in self._strangers:
            return  # dropped by an earlier event of the same _run_once()
        handshake = stranger.handshake
        try:
            # Never read beyond a frame: messages that follow the last one belong to the stream.
            data = stranger.sock.recv(FRAME_BYTES - len(stranger.inbox))
            stranger.inbox += data
            if len(stranger.inbox) == FRAME_BYTES:
                frame, stranger.inbox = stranger.inbox, b""
                # The few bytes of a handshake always fit into the empty buffer of a connection.
                stranger.sock.send(handshake.feed(frame))
            elif not data:
                self._drop(stranger)
        except BlockingIOError:
            return
        except (OSError, AuthenticationError):
            with contextlib.suppress(OSError):
                stranger.sock.send(handshake.farewell)
            self._drop(stranger)
        else:
            if handshake.done:
                self._start(stranger)

    def _start(self, stranger: _Stranger) -> None:
        """Serve a connection that has authenticated."""
        sock = stranger.sock
        self._forget(stranger)
        try:
            sock.setblocking(True)
            stream = MessageStream(sock, stranger.handshake.channel())
            with self._lock:
                self._connections.add(sock)
            threads.start(self._serve, stream)
        except OSError as error:
            with self._lock:
                self._connections.discard(sock)
            sock.close()
            self._complain(f"{stranger.label} was disconnected: {error.strerror}")

    def _drop(self, stranger: _Stranger, reason: str = "") -> None:
        self._forget(stranger)
        stranger.sock.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger]
        self._acceptor.discard(stranger)

    def _complain(self, text: str) -> None:
        self._complaints += 1
        if self._complaints <= _LOGGED:
            _log.warning("a listener of horoplug: %s", text)

    # ---- the threads of connections ----------------------------------------------------------------------------------

    def _serve(self, stream: MessageStream) -> None:
        try:
            self._on_connection(stream)
        except (OSError, AuthenticationError, ProtocolError):
            pass  # the connection has ended
        finally:
            with self._lock:
                self._connections.discard(stream.sock)
            stream.sock.close()
