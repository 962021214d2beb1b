"""The store's wire protocol: an 8-byte header and a strictly parsed binary payload, with a limit on every size.

A message of the connection (network/messages.py) has a header, kind u8, three zero bytes and tag u32, big-endian, and
the payload. A reply carries the tag of its request. Only GET may be answered out of order, so that a client can make
other requests while it waits. A key is length u16 and bytes, a value length u32 and bytes, a rank i32 (-1: none)."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence

from horoplug.base.errors import ProtocolError

HEADER = struct.Struct("!BHBI")
MAX_KEY = 512
MAX_VALUE = 1 << 20
MAX_TEXT = 1024
ANY_RANK = -2
"""In a GET, the owner of a key that no rank can set any more once any rank is lost."""
MAX_KEYS = 1 << 17  # of one GET; the largest job has that many ranks
MAX_REQUEST = 8 << 20  # MAX_REQUEST and MAX_REPLY include the header
MAX_REPLY = 64 << 20
MAX_WAITING = 8  # pending GETs of one connection

AUTH_CONTEXT = b"store"


class Op(enum.IntEnum):
    """Requests. The comments give the payload and the effect."""

    REGISTER = 1  # rank, description of the process: register as this rank
    SET = 2  # key, value
    CLAIM = 3  # key, value: set if absent
    GET = 4  # timeout in ms u32, count u32, (rank, key) …: wait until all keys are set
    DELETE = 5  # prefix
    ABORT = 6  # rank, text, prefix: every GET of a missing key with this prefix fails from now on
    LEAVE = 7  # nothing: the end of this connection does not count as a loss


class Reply(enum.IntEnum):
    """Replies. The comments give the payload."""

    OK = 1  # nothing
    VALUES = 2  # value …, in the order of the request
    TIMED_OUT = 3  # count u32, position u32 …: the missing keys of the request
    LOST = 4  # rank, text
    TAKEN = 5  # description of the holder
    REFUSED = 6  # text


class Reader:
    """Reads the fields of a payload. Every method raises ProtocolError if the payload is malformed."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        end = self._at + count
        if end > len(self._payload):
            raise ProtocolError("a message ends too early")
        data = self._payload[self._at : end]
        self._at = end
        return data

    def u32(self) -> int:
        """An unsigned 32-bit number."""
        return int.from_bytes(self.take(4), "big")

    def rank(self) -> int:
        """A rank, or -1."""
        value = self.owner()
        if value < -1:
            raise ProtocolError(f"{value} is not a rank")
        return value

    def owner(self) -> int:
        """A rank, -1, or :data:`ANY_RANK`."""
        value = int.from_bytes(self.take(4), "big", signed=True)
        if value < ANY_RANK:
            raise ProtocolError(f"{value} is not a rank")
        return value

    def key(self) -> bytes:
        """A key or a prefix."""
        length = int.from_bytes(self.take(2), "big")
        if length > MAX_KEY:
            raise ProtocolError(f"a key of {length} bytes; the limit is {MAX_KEY}")
        return self.take(length)

    def value(self, limit: int = MAX_VALUE) -> bytes:
        """A value."""
        length = self.u32()
        if length > limit:
            raise ProtocolError(f"a value of {length} bytes; the limit is {limit}")
        return self.take(length)

    def text(self) -> str:
        """A short text. Unprintable characters are replaced by "?", since texts end up in logs."""
        decoded = self.value(MAX_TEXT).decode("utf-8", "replace")
        return "".join(c if c.isprintable() else "?" for c in decoded)

    def end(self) -> None:
        """Check that the whole payload has been read."""
        if self._at != len(self._payload):
            raise ProtocolError("a message is longer than its contents")


def pack_rank(rank: int) -> bytes:
    """A rank, or -1."""
    return rank.to_bytes(4, "big", signed=True)


def pack_key(key: bytes) -> bytes:
    """A key. Errors: ValueError if it is too long."""
    if len(key) > MAX_KEY:
        raise ValueError(f"a key of {len(key)} bytes; the limit is {MAX_KEY}")
    return len(key).to_bytes(2, "big") + key


def pack_value(value: bytes) -> bytes:
    """A value. Errors: ValueError if it is too long."""
    if len(value) > MAX_VALUE:
        raise ValueError(f"a value of {len(value)} bytes; the limit is {MAX_VALUE}")
    return len(value).to_bytes(4, "big") + value


def pack_text(text: str) -> bytes:
    """A text, truncated to MAX_TEXT bytes."""
    return pack_value(text.encode("utf-8", "replace")[:MAX_TEXT])


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """A count and that many u32."""
    return struct.pack(f"!I{len(numbers)}I", len(numbers), *numbers)


def pack_get(timeout: float, keys: Sequence[bytes], owners: Iterable[int]) -> bytes:
    """The payload of a GET; ``timeout`` in seconds."""
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys at once; the limit is {MAX_KEYS}")
    parts = [struct.pack("!II", min(int(timeout * 1000), 2**32 - 1), len(keys))]
    parts += [pack_rank(owner) + pack_key(key) for owner, key in zip(owners, keys, strict=True)]
    return b"".join(parts)


def pack(kind: int, tag: int, payload: bytes = b"") -> bytes:
    """A message: header and payload."""
    return HEADER.pack(kind, 0, 0, tag) + payload


def unpack(message: bytes) -> tuple[int, int, bytes]:
    """(kind, tag, payload) of a message. Errors: ProtocolError."""
    if len(message) < HEADER.size:
        raise ProtocolError("a message has no header")
    kind, zero, zero_too, tag = HEADER.unpack_from(message)
    if zero or zero_too:
        raise ProtocolError("a message has no valid header")
    return kind, tag, message[HEADER.size :]
