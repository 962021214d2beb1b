"""Authenticates objects of ``broadcast_object``, ``allgather_object`` and ``send_object`` before they are unpickled.

Objects travel as the data of ordinary operations, over connections whose later traffic is not authenticated. Each
pickled object therefore has a header:

    source rank u64, number u64, length u64, SHA-256 of the pickled object, tag

    tag = HMAC-SHA256(key, operation, process set, name, the fields before)

All ranks of a job derive the key from the job's secret and fresh random bytes, after each ``init``
(:func:`horoplug.rendezvous.connections.peers.connect_peers`). Each rank numbers the objects that it sends. A receiver
requires that the numbers from a rank grow, separately for each operation, process set and name: operations of one name
run one after the other, while those of different names may run in any order. Ranks need not agree on the numbers,
because after a failed operation or a ``join`` they have not called the same operations."""

from __future__ import annotations

import collections
import hashlib
import hmac
import struct
import threading
from typing import NamedTuple

from horoplug.base.errors import TamperedMessageError
from horoplug.base.numbers import numbers

_FIELDS = struct.Struct("!QQQ32s")
HEADER_BYTES = _FIELDS.size + 32
_REMEMBERED = 1 << 14  # numbers to keep in all; there is one for each operation and source
_REMEMBERED_PER_RANK = 256

Buffer = bytes | bytearray | memoryview


class ObjectOperation(NamedTuple):
    """The operation that carries objects."""

    kind: str
    """``broadcast``, ``allgather`` or ``recv``."""
    process_set: int
    name: str | None


class _Known:
    """The state of one rank about one operation: the key, and the last number from each source."""

    __slots__ = ("last", "mac")

    def __init__(self, key: bytes, operation: ObjectOperation) -> None:
        name = b"" if operation.name is None else b"named " + operation.name.encode()
        context = f"{operation.kind} {operation.process_set} ".encode() + name
        self.mac = hmac.new(key, len(context).to_bytes(4, "big") + context, hashlib.sha256)
        self.last: dict[int, int] = {}  # by source: the number that was accepted last

    def tag(self, fields: Buffer) -> bytes:
        mac = self.mac.copy()
        mac.update(fields)
        return mac.digest()


class ObjectTags:
    """Makes and checks the headers of one rank in one generation. Thread-safe."""

    def __init__(self, key: bytes, rank: int, size: int) -> None:
        """``key``: the same on all ranks; ``size``: number of ranks."""
        self._key = key
        self._rank = rank
        self._capacity = _REMEMBERED + _REMEMBERED_PER_RANK * size
        self._numbers = numbers()
        self._lock = threading.Lock()
        # In the order of last use, the least recently used operation first.
        self._known: collections.OrderedDict[ObjectOperation, _Known] = collections.OrderedDict()
        self._remembered = 0  # numbers in all of _known
        self._floors: dict[int, int] = {}  # by source: the highest number that was forgotten

    def seal(self, operation: ObjectOperation, data: Buffer) -> bytes:
        """The header of an object that this rank sends."""
        digest = hashlib.sha256(data).digest()
        fields = _FIELDS.pack(self._rank, next(self._numbers), len(data), digest)
        return fields + self._find(operation).tag(fields)

    def check_header(
        self, operation: ObjectOperation, source: int, header: Buffer
    ) -> tuple[int, bytes]:
        """Check the header of an object from rank ``source``. Returns the object's length, and its SHA-256 for
        :meth:`check`. Errors: TamperedMessageError."""
        known = self._find(operation)
        fields = header[: _FIELDS.size]
        if not hmac.compare_digest(known.tag(fields), header[_FIELDS.size :]):
            raise _error(operation, source, "was changed on its way, or made by another process")
        sender, number, length, digest = _FIELDS.unpack(fields)
        if sender != source:
            raise _error(operation, source, f"is one from rank {sender}")
        with self._lock:
            last = known.last.get(source)
            floor = self._floors.get(source, 0) if last is None else last
            if number > floor:
                known.last[source] = number
                self._remembered += last is None
        if number <= floor:
            raise _error(operation, source, "was repeated, or came out of order")
        return length, digest

    def _find(self, operation: ObjectOperation) -> _Known:
        with self._lock:
            known = self._known.get(operation)
            if known is None:
                known = self._known[operation] = _Known(self._key, operation)
                self._remembered += 1
                while self._remembered > self._capacity and len(self._known) > 1:
                    self._forget()
            else:
                self._known.move_to_end(operation)
            return known

    def _forget(self) -> None:
        _, known = self._known.popitem(last=False)
        self._remembered -= 1 + len(known.last)
        for source, number in known.last.items():
            self._floors[source] = max(self._floors.get(source, 0), number)


def check(operation: ObjectOperation, source: int, digest: bytes, data: Buffer) -> None:
    """Check that an object is the one of the header with this SHA-256. Errors: TamperedMessageError."""
    if hashlib.sha256(data).digest() != digest:
        raise _error(operation, source, "was changed on its way")


def _error(operation: ObjectOperation, source: int, what: str) -> TamperedMessageError:
    name = "" if operation.name is None else f" {operation.name}"
    return TamperedMessageError(
        f"{operation.kind}_object{name}: the object from rank {source} {what}; it was not unpickled"
    )
