"""Mutual authentication with the job's secret over a connected stream socket.

    client                                   server
    HELLO  nonce_c              ->
                                <-           HELLO  nonce_s
    PROOF  mac("client proof")  ->           checked; on failure: REJECT, close
                                <-           PROOF  mac("server proof")
    ACCEPT mac("accept")        ->           (or REJECT, close)

    mac(label) = HMAC-SHA256(secret, label, context, nonce_c, nonce_s), each part preceded by its length

Every frame has 40 bytes: magic, version, kind, two zero bytes, 32 bytes of body. Both nonces are fresh, and the label
contains the role. So no frame of one side is a valid answer of the other side, in this handshake (reflection) or in a
later one (replay). The context names the listener (the store's, or that of rank 3): a proof for one listener cannot be
relayed to another. The server proves itself only to a client that has proved itself. Both sides also derive the keys
that authenticate the messages that follow (messages.py): an attacker who relays the handshake does not learn them.

For an encrypted connection, both sides send a frame of kind KEY in place of HELLO, whose nonce is a fresh X25519 public
key (encryption.py). The labels differ, too, so that an attacker cannot downgrade the connection. The client decides
whether the connection is encrypted. A server may require one kind of client; the store accepts both.

:class:`Handshake` does no I/O, so that one event loop can run many; :func:`authenticate` runs one on a blocking socket.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import secrets
import socket
import struct
import time

from horoplug.base.errors import AuthenticationError, WrongSecretError
from horoplug.rendezvous.network.encryption import EncryptedChannel, SessionKeys, fresh_key
from horoplug.rendezvous.network.libcrypto import PrivateKey
from horoplug.rendezvous.network.messages import MessageChannel

SECRET_BYTES = 32
_FRAME = struct.Struct("!4sBBH32s")
FRAME_BYTES = _FRAME.size
_MAGIC = b"HPau"
_VERSION = 2  # 1: the messages after the handshake had no tags
_EMPTY = bytes(32)
_ALIKE = "unlike this process; set HOROPLUG_ENCRYPT alike on every rank"


class Role(enum.Enum):
    """The client connected, the server listened."""

    CLIENT = b"client proof"
    SERVER = b"server proof"


class Encryption(enum.Enum):
    """Whether a connection is encrypted. Servers may leave it to the client."""

    OFF = 0
    ON = 1
    AS_CLIENT = 2


class _Kind(enum.IntEnum):
    HELLO = 1
    PROOF = 2
    ACCEPT = 3
    REJECT = 4
    KEY = 5  # a HELLO that asks for, or agrees to, encryption
    NO_KEY = 6  # the server does not encrypt; it closes the connection


class Handshake:
    """One side of the handshake as a state machine: frames in, frames out, no I/O and no clock."""

    def __init__(
        self,
        secret: bytes,
        role: Role,
        context: bytes,
        peer: str,
        encryption: Encryption = Encryption.OFF,
    ) -> None:
        """``peer``: names the other side in messages.

        Errors: ValueError for a secret that does not have 32 bytes, or if encryption is on but not available."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a job's secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._role = role
        self._context = context
        self._peer = peer
        self._encryption = encryption
        self._key: PrivateKey | None = None  # if the connection is encrypted
        self._session: SessionKeys | None = None
        self._nonce = secrets.token_bytes(32)
        if encryption is Encryption.ON and role is Role.CLIENT:
            self._make_key()
        self._client_nonce = self._server_nonce = b""
        self._expected = _Kind.HELLO
        self.done = False
        self.farewell = b""
        """After an error: the frame to send before closing, so that the peer learns the reason."""

    def start(self) -> bytes:
        """The first frame to send; empty for a server."""
        return self._hello() if self._role is Role.CLIENT else b""

    def feed(self, frame: bytes) -> bytes:
        """Handle a frame of FRAME_BYTES bytes and return the answer to send.

        Errors: AuthenticationError; the handshake cannot continue then."""
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
        if kind == _Kind.NO_KEY and self._key is not None:
            raise self._fail(f"{self._peer} does not encrypt this connection, {_ALIKE}")
        if kind in (_Kind.HELLO, _Kind.KEY) and self._expected is _Kind.HELLO:
            self._agree_on_encryption(kind == _Kind.KEY)
            kind = _Kind.HELLO
        if self.done or kind != self._expected:
            raise self._fail(f"{self._peer} sent authentication frames out of order")
        return self._client(body) if self._role is Role.CLIENT else self._server(body)

    def channel(self) -> MessageChannel:
        """The channel that authenticates the messages after the handshake. Call it once, when :attr:`done` is true."""
        assert self.done
        tags = self._keys(b"messages")
        if self._key is None:
            return MessageChannel(*tags, self._peer)
        return EncryptedChannel(*tags, self._peer, self._keys(b"encrypted messages"))

    def data_keys(self) -> bytes:
        """The two keys, of 32 bytes each, that encrypt what the core sends and receives on this connection; empty if
        the connection is not encrypted. Call it when :attr:`done` is true."""
        return b"" if self._key is None else b"".join(self._keys(b"data"))

    def _keys(self, label: bytes) -> tuple[bytes, bytes]:
        """The keys for the purpose ``label``: of what this side sends, and of what it receives."""
        derive = self._mac if self._key is None else self._session_keys().derive
        from_client, from_server = derive(b"client " + label), derive(b"server " + label)
        is_client = self._role is Role.CLIENT
        return (from_client, from_server) if is_client else (from_server, from_client)

    def _session_keys(self) -> SessionKeys:
        if self._session is None:
            assert self._key is not None
            is_client = self._role is Role.CLIENT
            other = self._server_nonce if is_client else self._client_nonce
            transcript = self._mac(b"keys")
            self._session = SessionKeys(self._secret, self._key, other, transcript, self._peer)
        return self._session

    def _make_key(self) -> None:
        self._key = fresh_key()
        self._nonce = self._key.public

    def _hello(self) -> bytes:
        return _pack(_Kind.HELLO if self._key is None else _Kind.KEY, self._nonce)

    def _agree_on_encryption(self, wanted: bool) -> None:
        """Decide whether the connection is encrypted. ``wanted``: whether the other side encrypts."""
        if self._encryption is (Encryption.OFF if wanted else Encryption.ON):
            does = "encrypts" if wanted else "does not encrypt"
            answer = _Kind.NO_KEY if wanted else _Kind.REJECT
            raise self._fail(f"{self._peer} {does} this connection, {_ALIKE}", answer)
        if wanted and self._key is None:
            try:
                self._make_key()
            except ValueError as error:
                raise self._fail(f"{self._peer} cannot be served: {error}", _Kind.NO_KEY) from None

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
            return self._hello()
        if self._expected is _Kind.PROOF:
            self._check(body, Role.CLIENT.value)
            self._expected = _Kind.ACCEPT
            return _pack(_Kind.PROOF, self._mac(Role.SERVER.value))
        self._check(body, b"accept")
        self.done = True
        return b""

    def _take_nonces(self, client: bytes, server: bytes) -> None:
        if hmac.compare_digest(client, server):
            raise self._fail(f"{self._peer} only sends back what it receives")
        self._client_nonce, self._server_nonce = client, server

    def _mac(self, label: bytes) -> bytes:
        begin = b"horoplug 1" if self._key is None else b"horoplug 1 encrypted"
        mac = hmac.new(self._secret, begin, hashlib.sha256)
        for part in (label, self._context, self._client_nonce, self._server_nonce):
            mac.update(len(part).to_bytes(4, "big") + part)
        return mac.digest()

    def _check(self, body: bytes, label: bytes) -> None:
        if not hmac.compare_digest(body, self._mac(label)):
            raise self._fail(
                f"{self._peer} does not know this job's secret; the connection was closed"
            )

    def _fail(self, message: str, answer: _Kind = _Kind.REJECT) -> AuthenticationError:
        self.farewell = _pack(answer, _EMPTY)
        return AuthenticationError(message)


def _pack(kind: _Kind, body: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, _VERSION, kind, 0, body)


def authenticate(
    sock: socket.socket,
    secret: bytes,
    role: Role,
    context: bytes,
    timeout: float,
    peer: str,
    encryption: Encryption = Encryption.OFF,
) -> MessageChannel:
    """Run a handshake on a connected socket, within ``timeout`` seconds. The socket's own timeout is restored.

    Returns the channel that authenticates, and perhaps encrypts, the messages that follow. Errors: AuthenticationError;
    the socket is then unusable, and the caller has to close it. ValueError if encryption is on but not available."""
    deadline = time.monotonic() + timeout
    before = sock.gettimeout()
    handshake = Handshake(secret, role, context, peer, encryption)
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
