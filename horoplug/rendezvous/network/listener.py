"""A server that authenticates its clients, with one thread for each connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from horoplug.base.errors import AuthenticationError, ProtocolError
from horoplug.rendezvous.network.auth import Encryption, Role, authenticate, least_deserving
from horoplug.rendezvous.network.messages import MessageStream

MOST_UNAUTHENTICATED = 256
"""Beyond this number of connections, or twice the number of expected clients, the oldest connection of the source that
has the most is dropped."""
_AUTH_SECONDS = 10.0


def bind(address: str, port: int = 0) -> socket.socket:
    """A listening socket. ``port``: 0 takes a free one. Errors: OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


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
        handshake."""
        self._sockets = sockets
        self._secret = secret
        self._context = context
        self._encryption = encryption
        self._expected = expected
        self._on_connection = serve
        self._auth_seconds = auth_seconds
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._unauthenticated: dict[socket.socket, str] = {}  # by connection: its source
        self._closed = False
        self._threads = [
            threading.Thread(target=self._accept, args=(sock,), daemon=True) for sock in sockets
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Accept no further connections."""
        self._closed = True
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def close(self) -> None:
        """Accept no further connections, and end all connections."""
        self.stop()
        with self._lock:
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, address = listener.accept()
            except OSError:
                if not self._closed:
                    threading.Event().wait(0.05)  # most likely out of descriptors
                continue
            with self._lock:
                self._connections.add(sock)
                self._unauthenticated[sock] = str(address[0])
                if len(self._unauthenticated) > max(MOST_UNAUTHENTICATED, 2 * self._expected):
                    dropped = least_deserving(self._unauthenticated)
                    del self._unauthenticated[dropped]
                    with contextlib.suppress(OSError):
                        dropped.shutdown(socket.SHUT_RDWR)  # ends its thread
            threading.Thread(target=self._serve, args=(sock, str(address[0])), daemon=True).start()

    def _serve(self, sock: socket.socket, source: str) -> None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                channel = authenticate(
                    *(sock, self._secret, Role.SERVER, self._context, self._auth_seconds, source),
                    self._encryption,
                )
            finally:
                with self._lock:
                    self._unauthenticated.pop(sock, None)
            self._on_connection(MessageStream(sock, channel))
        except (OSError, AuthenticationError, ProtocolError):
            pass  # the connection has ended
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()
