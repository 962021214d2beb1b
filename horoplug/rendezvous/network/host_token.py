"""Proves which ranks are on one host.

Names and ids do not identify a host: virtual machines that are cloned from one snapshot have the same boot id and the
same namespace numbers. Therefore the first rank on a host binds an abstract Unix socket, whose name follows from the
job's secret, and sends a random token to every other rank of the same user that connects. Ranks that can share memory
reach each other over such sockets, even in containers; ranks on clones do not. Ranks of different users do not share
memory."""

from __future__ import annotations

import errno
import hashlib
import hmac
import math
import os
import secrets
import socket
import time
from collections.abc import Hashable

from horoplug.base import threads
from horoplug.base.errors import RendezvousError
from horoplug.rendezvous.network.acceptor import Acceptor
from horoplug.rendezvous.network.peer_user import is_own_user

_BYTES = 16
_PAUSE = 0.002  # seconds until the next attempt, while the first rank is about to listen or has just ended


class HostToken:
    """The token of this host. A context manager: stay within until all other ranks are known to have theirs."""

    def __init__(self, secret: bytes, job: str, timeout: float) -> None:
        """``job``: text that names the job and the generation, for the name of the socket. Errors: RendezvousError
        after ``timeout`` seconds."""
        data = f"horoplug host\0{os.geteuid()} {job}"
        digest = hmac.new(secret, data.encode(), hashlib.sha256).hexdigest()
        name = f"\0horoplug-host-{digest[:32]}"
        self._listener: socket.socket | None = None
        self._closed = False
        self.value = self._obtain(name, time.monotonic() + timeout)
        """Text that is equal for the ranks of one host."""

    def _obtain(self, name: str, deadline: float) -> str:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(name)
            except OSError as error:
                with sock:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    found = _ask(name, deadline)
                if found is not None:
                    return (found or secrets.token_bytes(_BYTES)).hex()
            else:
                token = secrets.token_bytes(_BYTES)
                sock.listen(1024)
                threads.start(self._serve, sock, token)
                self._listener = sock
                return token.hex()
            if time.monotonic() > deadline:
                raise RendezvousError("a rank on this host that started earlier does not answer")
            time.sleep(_PAUSE)

    def __enter__(self) -> HostToken:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._listener.close()

    def _serve(self, listener: socket.socket, token: bytes) -> None:
        def answer(sock: socket.socket, _label: str, _source: Hashable) -> None:
            if is_own_user(sock):
                sock.send(token)

        # No connection outlives its answer, so that none is ever dropped.
        acceptor: Acceptor[socket.socket] = Acceptor(
            *(answer, lambda *_: None, lambda _: None), most=lambda: 1, seconds=math.inf
        )
        while not self._closed:
            acceptor.accept(listener)


def _ask(name: str, deadline: float) -> bytes | None:
    """The token of the rank that has bound the name; None if no rank listens there at the moment; empty if a process of
    another user has bound the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            sock.connect(name)
            if not is_own_user(sock):
                return b""
            found = sock.recv(_BYTES, socket.MSG_WAITALL)
        except OSError:
            return None
    return found if len(found) == _BYTES else None
