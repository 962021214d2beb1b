"""Programs without a job's secret, which answer connections that are meant for a job."""

import contextlib
import socket
import threading

from tests.harness.limits import scaled

REJECT = b"HPau\x02\x04\0\0" + bytes(32)
"""The frame with which one side of the handshake refuses the other (network/auth.py)."""


class RefusingServer:
    """Listens on an address and refuses whoever connects, as a rank with another secret would. A context manager.

    ``refused``: set once a connection has been refused."""

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int] | bytes) -> None:
        self.refused = threading.Event()
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        if family != socket.AF_UNIX:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(address)
        self._listener.listen(64)
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(20)
                sock.recv(4096)  # unread data would reset the connection before the answer arrives
                sock.sendall(REJECT)
                sock.shutdown(socket.SHUT_WR)
                self.refused.set()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(scaled(20))

    def __enter__(self) -> "RefusingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
