"""Connects to a server of the job: over TCP, then by the handshake of auth.py."""

from __future__ import annotations

import socket
import time

from horoplug.base.errors import AuthenticationError, RendezvousError
from horoplug.rendezvous.network.auth import Encryption, Role, authenticate
from horoplug.rendezvous.network.messages import MessageChannel

_PAUSES = (0.01, 0.25)  # seconds between two attempts: first and longest

Connection = tuple[socket.socket, MessageChannel]
"""A blocking socket without a timeout, and the channel that authenticates its messages."""


def attempt(
    address: str, port: int, secret: bytes, context: bytes, timeout: float, peer: str, encrypt: bool
) -> Connection:
    """Make one attempt, of at most ``timeout`` seconds.

    ``context``: names the listener, as in :class:`.auth.Handshake`; ``peer``: names it in messages. Errors:
    AuthenticationError; OSError if nobody answers; ValueError if encryption is on but not available."""
    deadline = time.monotonic() + timeout
    sock = socket.create_connection((address, port), timeout=timeout)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        remaining = max(deadline - time.monotonic(), 0.5)
        encryption = Encryption.ON if encrypt else Encryption.OFF
        channel = authenticate(sock, secret, Role.CLIENT, context, remaining, peer, encryption)
        sock.settimeout(None)
        return sock, channel
    except BaseException:
        sock.close()
        raise


def connect(
    address: str, port: int, secret: bytes, context: bytes, timeout: float, peer: str, encrypt: bool
) -> Connection:
    """Retry :func:`attempt` for ``timeout`` seconds. The other parameters are those of :func:`attempt`.

    A failure is not final while the server does not accept connections, or while a process that has not proved to know
    the secret answers in its place. Errors after ``timeout`` seconds: AuthenticationError in the second case, otherwise
    RendezvousError."""
    deadline = time.monotonic() + timeout
    pause = _PAUSES[0]
    while True:
        remaining = max(deadline - time.monotonic(), 0.001)
        try:
            return attempt(address, port, secret, context, remaining, peer, encrypt)
        except AuthenticationError:
            if time.monotonic() + pause >= deadline:
                raise
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise RendezvousError(
                    f"{peer} cannot be reached within {timeout:g} s: {error.strerror or error}"
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
