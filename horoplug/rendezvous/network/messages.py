"""Authenticated messages: the framing of every connection of this package after the handshake.

    header: length u32, tag     tag = HMAC-SHA256(key, "header", number, length)
    body: payload, tag          tag = HMAC-SHA256(key, "body", number, length, payload)

Each direction has a key of its own, which follows from the job's secret and both nonces of the handshake
(:meth:`horoplug.rendezvous.network.auth.Handshake.channel`), and numbers its messages u64 from 0. A message that was
changed, repeated, left out, reordered, sent back to its sender or taken from another connection has another key or
number, so that its tags differ. The length has a tag of its own, because the receiver allocates that many bytes and
waits for them. The messages are not encrypted, unless the connection is (encryption.py).

:class:`MessageChannel` does no I/O; :class:`MessageStream` applies one to a blocking socket."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct

from horoplug.base.errors import ProtocolError, TamperedMessageError

_TAG_BYTES = hashlib.sha256().digest_size
_HEADER = struct.Struct(f"!I{_TAG_BYTES}s")
_COUNTED = struct.Struct("!QI")
OVERHEAD = _HEADER.size + _TAG_BYTES
"""Bytes of a message in addition to its payload."""
MAX_MESSAGE = 2**32 - 1

Buffer = bytes | bytearray | memoryview


class MessageChannel:
    """One end of a connection. After an error of :meth:`take` the connection has to be closed."""

    overhead = OVERHEAD
    """Bytes of a message in addition to its payload."""

    def __init__(self, sending: bytes, receiving: bytes, peer: str) -> None:
        """``sending``, ``receiving``: the keys of the two directions; ``peer``: names the other end in messages."""
        self._sending = sending
        self._receiving = receiving
        self._peer = peer
        self._sent = 0
        self._received = 0
        self._length: int | None = None  # of the payload, once the header is checked

    def seal(self, *parts: Buffer) -> bytes:
        """The next message to send, with the concatenated ``parts`` as its payload. The caller has to send all messages
        in the order of the calls."""
        length = sum(map(len, parts))
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes; the limit is {MAX_MESSAGE}")
        counted = _COUNTED.pack(self._sent, length)
        self._sent += 1
        header = _HEADER.pack(length, _tag(self._sending, b"header", counted))
        return b"".join((header, *parts, _tag(self._sending, b"body", counted, *parts)))

    def missing(self, inbox: bytearray, limit: int) -> int:
        """The number of bytes that ``inbox`` lacks until :meth:`take` can return a message. While the header is
        incomplete, the result is the number of its missing bytes. ``limit``: for the length of the payload, in bytes.

        Errors: TamperedMessageError; ProtocolError if the other end exceeds the limit."""
        if self._length is None:
            if len(inbox) < _HEADER.size:
                return _HEADER.size - len(inbox)
            length, tag = _HEADER.unpack_from(inbox)
            expected = _tag(self._receiving, b"header", _COUNTED.pack(self._received, length))
            self._check(tag, expected)
            if length > limit:
                raise ProtocolError(f"a message of {length} bytes; the limit is {limit}")
            self._length = length
        return max(OVERHEAD + self._length - len(inbox), 0)

    def take(self, inbox: bytearray, limit: int) -> bytes | None:
        """Remove the first message from ``inbox``, the bytes received so far, and return its payload; None while it is
        incomplete. ``limit``: for the length of the payload, in bytes. Errors: those of :meth:`missing`."""
        if self.missing(inbox, limit):
            return None
        assert self._length is not None
        end = _HEADER.size + self._length
        counted = _COUNTED.pack(self._received, self._length)
        with memoryview(inbox) as view:
            payload = bytes(view[_HEADER.size : end])
            tag = bytes(view[end : end + _TAG_BYTES])
        self._check(tag, _tag(self._receiving, b"body", counted, payload))
        del inbox[: end + _TAG_BYTES]
        self._received += 1
        self._length = None
        return payload

    def _check(self, tag: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(tag, expected):
            raise TamperedMessageError(
                f"a message on the connection to {self._peer} was changed, repeated, left out or reordered on its way; "
                "it was not used, and the connection was closed"
            )


class MessageStream:
    """A blocking socket that is connected and authenticated, and exchanges messages."""

    def __init__(self, sock: socket.socket, channel: MessageChannel) -> None:
        self.sock = sock
        self._channel = channel

    def send(self, *parts: Buffer) -> None:
        """Send a message. Errors: OSError."""
        self.sock.sendall(self._channel.seal(*parts))

    def receive(self, limit: int) -> bytes:
        """Receive a message of at most ``limit`` bytes.

        Errors: TamperedMessageError, ProtocolError; OSError, also if the connection ends."""
        inbox = bytearray()
        while missing := self._channel.missing(inbox, limit):
            start = len(inbox)
            inbox += bytes(missing)
            with memoryview(inbox)[start:] as view:
                received = 0
                while received < missing:
                    count = self.sock.recv_into(view[received:])
                    if count == 0:
                        raise ConnectionResetError("the connection has ended")
                    received += count
        payload = self._channel.take(inbox, limit)
        assert payload is not None
        return payload


def _tag(key: bytes, label: bytes, counted: bytes, *parts: Buffer) -> bytes:
    mac = hmac.new(key, label + counted, hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
