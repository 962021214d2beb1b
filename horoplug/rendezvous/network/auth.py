"""Mutual authentication with the job's secret over a connected stream socket.

    client                                   server
    HELLO  nonce_c              ->
                                <-           HELLO  nonce_s
    PROOF  mac("client proof")  ->           checked; on failure: REJECT, close
                                <-           PROOF  mac("server proof")
    ACCEPT mac("accept")        ->           (or REJECT, close)

    mac(label) = HMAC-SHA256(secret, label, context, nonce_c, nonce_s), each part preceded by its length

Every frame has 40 bytes: magic, version, kind, two zero bytes, 32 bytes of body. Both nonces are fresh and the label
binds the role, so that nothing one side sent can serve as the other side's answer, now (reflection) or later (replay).
The context names the listener (the store's, or that of rank 3): a proof for one listener cannot be relayed to another.
The server proves itself only to a client that has proved itself. The handshake also gives both sides the keys that
authenticate the messages that follow (messages.py): an attacker who only passes the handshake on does not learn them.

:class:`Handshake` does no I/O, so that one event loop can run many; :func:`authenticate` runs one on a blocking socket.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

from horoplug.base.errors import AuthenticationError, WrongSecretError
from horoplug.rendezvous.network.messages import MessageChannel

_Connection = TypeVar("_Connection")

SECRET_BYTES = 32
_FRAME = struct.Struct("!4sBBH32s")
FRAME_BYTES = _FRAME.size
_MAGIC = b"HPau"
_VERSION = 2  # 1: the messages after the handshake had no tags
_EMPTY = bytes(32)


class Role(enum.Enum):
    """The client connected, the server listened."""

    CLIENT = b"client proof"
    SERVER = b"server proof"


class _Kind(enum.IntEnum):
    HELLO = 1
    PROOF = 2
    ACCEPT = 3
    REJECT = 4


class Handshake:
    """One side of the handshake as a state machine: frames in, frames out, no I/O and no clock."""

    def __init__(self, secret: bytes, role: Role, context: bytes, peer: str) -> None:
        """``peer``: names the other side in messages. Errors: ValueError for a secret that does not have 32 bytes."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a job's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._role = role
        self._context = context
        self._peer = peer
        self._nonce = secrets.token_bytes(32)
        self._client_nonce = self._server_nonce = b""
        self._expected = _Kind.HELLO
        self.done = False
        self.farewell = b""
        """After an error: the frame to send before closing, so that the peer learns the reason."""

    def start(self) -> bytes:
        """The first frame to send; empty for a server."""
        return _pack(_Kind.HELLO, self._nonce) if self._role is Role.CLIENT else b""

    def feed(self, frame: bytes) -> bytes:
        """Handle a frame of FRAME_BYTES bytes and return the answer to send.

        Errors: AuthenticationError; the handshake has then failed for good."""
        magic, version, kind, zero, body = _FRAME.unpack(frame)
        if magic != _MAGIC or zero != 0:
            raise self._fail(f"{self._peer} does not speak horoplug's protocol")
        if version != _VERSION:
            raise self._fail(
                f"{self._peer} speaks version {version} of horoplug's handshake, this process "
                f"{_VERSION}: all ranks need the same horoplug"
            )
        if kind == _Kind.REJECT:
            raise WrongSecretError(
                f"{self._peer} refused the connection: this process does not know this job's "
                "secret (its HOROVOD_SECRET_KEY differs)"
            )
        if self.done or kind != self._expected:
            raise self._fail(f"{self._peer} sent authentication frames out of order")
        return self._client(body) if self._role is Role.CLIENT else self._server(body)

    def channel(self) -> MessageChannel:
        """What authenticates the messages after the handshake, once that is :attr:`done`. Call it once."""
        assert self.done
        from_client, from_server = self._mac(b"client messages"), self._mac(b"server messages")
        if self._role is Role.CLIENT:
            return MessageChannel(from_client, from_server, self._peer)
        return MessageChannel(from_server, from_client, self._peer)

    def _client(self, body: bytes) -> bytes:
        if self._expected is _Kind.HELLO:
            self._take_nonces(client=self._nonce, server=body)
            self._expected = _Kind.PROOF
            return _pack(_Kind.PROOF, self._mac(Role.CLIENT.value))
        self._check(body, Role.SERVER.value)
        self.done = True
        return _pack(_Kind.ACCEPT, self._mac(b"accept"))

    def _server(self, body: bytes) -> bytes:
        if self._expected is _Kind.HELLO:
            self._take_nonces(client=body, server=self._nonce)
            self._expected = _Kind.PROOF
            return _pack(_Kind.HELLO, self._nonce)
        if self._expected is _Kind.PROOF:
            self._check(body, Role.CLIENT.value)
            self._expected = _Kind.ACCEPT
            return _pack(_Kind.PROOF, self._mac(Role.SERVER.value))
        self._check(body, b"accept")
        self.done = True
        return b""

    def _take_nonces(self, client: bytes, server: bytes) -> None:
        if hmac.compare_digest(client, server):
            raise self._fail(f"{self._peer} only echoes what it is sent")
        self._client_nonce, self._server_nonce = client, server

    def _mac(self, label: bytes) -> bytes:
        mac = hmac.new(self._secret, b"horoplug 1", hashlib.sha256)
        for part in (label, self._context, self._client_nonce, self._server_nonce):
            mac.update(len(part).to_bytes(4, "big") + part)
        return mac.digest()

    def _check(self, body: bytes, label: bytes) -> None:
        if not hmac.compare_digest(body, self._mac(label)):
            raise self._fail(
                f"{self._peer} does not know this job's secret; the connection was closed"
            )

    def _fail(self, message: str) -> AuthenticationError:
        self.farewell = _pack(_Kind.REJECT, _EMPTY)
        return AuthenticationError(message)


def _pack(kind: _Kind, body: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, _VERSION, kind, 0, body)


def authenticate(
    sock: socket.socket, secret: bytes, role: Role, context: bytes, timeout: float, peer: str
) -> MessageChannel:
    """Run a handshake on a connected socket, within ``timeout`` seconds. The socket's own timeout is restored.

    Returns what authenticates the messages that follow. Errors: AuthenticationError; the socket is then unusable, and
    the caller has to close it."""
    deadline = time.monotonic() + timeout
    before = sock.gettimeout()
    handshake = Handshake(secret, role, context, peer)
    try:
        _send(sock, handshake.start(), deadline)
        while not handshake.done:
            frame = b""
            while len(frame) < FRAME_BYTES:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                data = sock.recv(FRAME_BYTES - len(frame))
                if not data:
                    raise AuthenticationError(f"{peer} closed the connection while authenticating")
                frame += data
                if time.monotonic() > deadline:
                    raise TimeoutError
            _send(sock, handshake.feed(frame), deadline)
        return handshake.channel()
    except AuthenticationError:
        with contextlib.suppress(OSError):
            _send(sock, handshake.farewell, time.monotonic() + 1.0)
        raise
    except TimeoutError:
        raise AuthenticationError(f"{peer} did not authenticate within {timeout:g} s") from None
    except OSError as error:
        raise AuthenticationError(
            f"{peer} broke the connection while authenticating: {error.strerror}"
        ) from None
    finally:
        sock.settimeout(before)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    if data:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(data)


def least_deserving(waiting: Mapping[_Connection, Hashable]) -> _Connection:
    """The connection to drop if too many have not authenticated: the oldest of the source that has most.

    A host that opens connections and stays silent displaces its own connections, not those of other hosts.
    ``waiting``: by connection, oldest first: its source."""
    counts = collections.Counter(waiting.values())
    most = max(counts.values())
    return next(each for each, source in waiting.items() if counts[source] == most)
