"""The state machine of the store, without I/O and without a clock.

A *session* is one authenticated connection, for this module an opaque object. Every request is answered through
``reply(session, message)``: at once, or for a GET that has to wait, when its last key is set, its deadline passes, or a
rank that owns one of its keys is lost."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Hashable

from horoplug.base.errors import ProtocolError
from horoplug.rendezvous.store import protocol
from horoplug.rendezvous.store.protocol import Op, Reader, Reply

MAX_TOTAL = 256 << 20  # bytes of keys and values together
_ENTRY_COST = 100  # counted per key in addition to its bytes, so that tiny entries are limited, too


@dataclasses.dataclass(eq=False)
class _Get:
    session: Hashable
    tag: int
    keys: list[bytes]
    owners: set[int]
    deadline: float
    missing: int = 0
    """Number of keys, with repetitions, that the GET still waits for."""


class StoreState:
    """All keys, the registered ranks, and the pending GETs."""

    def __init__(
        self,
        reply: Callable[[Hashable, bytes], None],
        on_set: Callable[[bytes, bytes], None] = lambda key, value: None,
    ) -> None:
        """``on_set``: called with each key and value that a client sets."""
        self._reply = reply
        self._on_set = on_set
        self._values: dict[bytes, bytes] = {}
        self._total = 0
        # By missing key: how often each GET asks for it, in order of arrival.
        self._waiting: dict[bytes, dict[_Get, int]] = {}
        self._of_session: dict[Hashable, dict[_Get, None]] = {}
        self._deadlines: list[tuple[float, int, _Get]] = []
        self._count = itertools.count()
        self._sessions: dict[int, tuple[Hashable, str]] = {}  # live ranks: session, description
        self._rank_of: dict[Hashable, int] = {}
        self._lost: dict[int, str] = {}
        self._aborted: dict[bytes, tuple[int, str]] = {}
        self.departures: list[int] = []
        """Ranks in the order in which they left or were lost; a rank that registers again is removed."""

    @property
    def present(self) -> int:
        """Number of registered ranks."""
        return len(self._sessions)

    def value(self, key: bytes) -> bytes | None:
        """The value of a key; None if the key is not set."""
        return self._values.get(key)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def request(self, session: Hashable, kind: int, tag: int, payload: bytes, now: float) -> None:
        """Handle one message. ``now``: the current ``time.monotonic()``.

        Errors: ProtocolError; the caller then has to close the session."""
        reader = Reader(payload)
        if kind == Op.GET:
            self._get(session, tag, reader, now)
        elif kind in (Op.SET, Op.CLAIM):
            self._set(session, tag, reader, claim=kind == Op.CLAIM)
        elif kind == Op.REGISTER:
            self._register(session, tag, reader)
        elif kind == Op.DELETE:
            prefix = reader.key()
            reader.end()
            self._delete(prefix)
            self._answer(session, Reply.OK, tag)
        elif kind == Op.ABORT:
            rank, text, prefix = reader.rank(), reader.text(), reader.key()
            reader.end()
            self._abort(prefix, rank, text)
            self._answer(session, Reply.OK, tag)
        elif kind == Op.LEAVE:
            reader.end()
            self._leave(session)
            self._answer(session, Reply.OK, tag)
        else:
            raise ProtocolError(f"a request has the unknown kind {kind}")

    def _register(self, session: Hashable, tag: int, reader: Reader) -> None:
        rank, description = reader.rank(), reader.text()
        reader.end()
        if rank < 0 or self._rank_of.get(session, rank) != rank:
            raise ProtocolError(f"a connection cannot become rank {rank}")
        holder = self._sessions.get(rank)
        if holder is not None and holder[0] != session:
            self._answer(session, Reply.TAKEN, tag, protocol.pack_text(holder[1]))
            return
        self._sessions[rank] = session, description
        self._rank_of[session] = rank
        self._lost.pop(rank, None)
        if rank in self.departures:
            self.departures.remove(rank)
        self._answer(session, Reply.OK, tag)

    def _set(self, session: Hashable, tag: int, reader: Reader, claim: bool) -> None:
        key, value = reader.key(), reader.value()
        reader.end()
        before = self._values.get(key)
        if claim and before is not None:
            self._answer(session, Reply.TAKEN, tag, protocol.pack_value(before))
            return
        if not self._put(key, value):
            raise ProtocolError(f"more than {MAX_TOTAL} bytes in the store")
        self._answer(session, Reply.OK, tag)
        self._on_set(key, value)
        self._answer_waiting(key)

    def set(self, key: bytes, value: bytes) -> None:
        """Set a key for the server itself. Nothing is set if the store is full."""
        if self._put(key, value):
            self._answer_waiting(key)

    def _put(self, key: bytes, value: bytes) -> bool:
        before = self._values.get(key)
        total = self._total + len(value)
        total += len(key) + _ENTRY_COST if before is None else -len(before)
        if total > MAX_TOTAL:
            return False
        self._total = total
        self._values[key] = value
        return True

    def _answer_waiting(self, key: bytes) -> None:
        # The cost for a waiting GET does not depend on the number of keys that it waits for.
        for get, times in self._waiting.pop(key, {}).items():
            get.missing -= times
            if not get.missing:
                self._answer_values(get)

    def _get(self, session: Hashable, tag: int, reader: Reader, now: float) -> None:
        timeout, count = reader.u32() / 1000, reader.u32()
        if count > protocol.MAX_KEYS:
            raise ProtocolError(f"{count} keys at once; the limit is {protocol.MAX_KEYS}")
        pairs = [(reader.owner(), reader.key()) for _ in range(count)]
        reader.end()
        keys, owners = [key for _, key in pairs], {owner for owner, _ in pairs}
        get = _Get(session, tag, keys, owners, now + timeout)
        if not self._missing(get):
            self._answer_values(get)
            return
        loss = self._loss(get)
        if loss is not None:
            self._finish(get, Reply.LOST, protocol.pack_rank(loss[0]) + protocol.pack_text(loss[1]))
            return
        own = self._of_session.setdefault(session, {})
        if len(own) >= protocol.MAX_WAITING:
            raise ProtocolError(f"more than {protocol.MAX_WAITING} waits at once")
        own[get] = None
        self._wait_for_missing(get)
        heapq.heappush(self._deadlines, (get.deadline, next(self._count), get))

    def _loss(self, get: _Get) -> tuple[int, str] | None:
        """The lost rank that makes a GET fail, and the reason; None if the GET can still succeed.

        Owners whose keys are set count, too: a GET of the keys of several ranks needs all these ranks alive."""
        needs_all = protocol.ANY_RANK in get.owners
        if self._lost and (needs_all or not self._lost.keys().isdisjoint(get.owners)):
            owner = next(owner for owner in self._lost if needs_all or owner in get.owners)
            return owner, self._lost[owner]
        for prefix, abort in self._aborted.items():
            if any(key.startswith(prefix) and key not in self._values for key in get.keys):
                return abort
        return None

    def _missing(self, get: _Get) -> list[int]:
        """The positions of the keys that are not set."""
        return [i for i, key in enumerate(get.keys) if key not in self._values]

    def _wait_for_missing(self, get: _Get) -> None:
        for i in self._missing(get):
            waiting = self._waiting.setdefault(get.keys[i], {})
            waiting[get] = waiting.get(get, 0) + 1
            get.missing += 1

    def _delete(self, prefix: bytes) -> None:
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._total -= len(key) + len(self._values.pop(key)) + _ENTRY_COST
        for key in [key for key in self._aborted if key.startswith(prefix)]:
            del self._aborted[key]

    def _abort(self, prefix: bytes, rank: int, text: str) -> None:
        if len(self._aborted) >= 10000:
            raise ProtocolError("too many aborted prefixes")
        # Keep the first reason: later ones are its consequences.
        self._aborted.setdefault(prefix, (rank, text))
        self._fail_gets_of_lost_ranks()

    def _leave(self, session: Hashable) -> None:
        rank = self._rank_of.pop(session, None)
        if rank is not None:
            del self._sessions[rank]
            self._departed(rank)

    # ---- events ------------------------------------------------------------------------------------------------------

    def closed(self, session: Hashable, reason: str = "ended without leaving the job") -> None:
        """A connection has ended. If its rank has not sent LEAVE, the rank is lost, for this ``reason``."""
        for get in list(self._of_session.get(session, ())):
            self._forget(get)
        rank = self._rank_of.get(session)
        if rank is not None:
            description = self._sessions[rank][1]
            self._leave(session)
            self.lost(rank, f"rank {rank} ({description}) {reason}")

    def lost(self, rank: int, text: str) -> None:
        """A rank has ended and will set no more keys. The first reason given for a rank is kept."""
        self._departed(rank)
        self._lost.setdefault(rank, text)
        self._fail_gets_of_lost_ranks()

    def expire(self, now: float) -> float | None:
        """Answer the GETs whose deadline has passed. Returns the next deadline, None without one."""
        while self._deadlines:
            deadline, _, get = self._deadlines[0]
            if get in self._of_session.get(get.session, ()):
                if deadline > now:
                    return deadline
                self._finish(get, Reply.TIMED_OUT, protocol.pack_numbers(self._missing(get)))
            heapq.heappop(self._deadlines)
        return None

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _departed(self, rank: int) -> None:
        if rank not in self.departures:
            self.departures.append(rank)

    def _fail_gets_of_lost_ranks(self) -> None:
        for gets in list(self._of_session.values()):
            for get in list(gets):
                loss = self._loss(get)
                if loss is not None:
                    payload = protocol.pack_rank(loss[0]) + protocol.pack_text(loss[1])
                    self._finish(get, Reply.LOST, payload)

    def _answer_values(self, get: _Get) -> None:
        if self._missing(get):
            self._wait_for_missing(get)  # a key was set and deleted while the GET waited for others
            return
        size = sum(len(self._values[key]) + 4 for key in get.keys) + protocol.HEADER.size
        if size > protocol.MAX_REPLY:
            text = f"the values asked for have {size} bytes; the limit is {protocol.MAX_REPLY}"
            self._finish(get, Reply.REFUSED, protocol.pack_text(text))
            return
        values = b"".join(protocol.pack_value(self._values[key]) for key in get.keys)
        self._finish(get, Reply.VALUES, values)

    def _finish(self, get: _Get, kind: Reply, payload: bytes) -> None:
        self._forget(get)
        self._answer(get.session, kind, get.tag, payload)

    def _forget(self, get: _Get) -> None:
        own = self._of_session.get(get.session)
        if own is not None:
            own.pop(get, None)
            if not own:
                del self._of_session[get.session]
        if not get.missing:
            return
        for key in get.keys:
            gets = self._waiting.get(key)
            if gets is not None:
                gets.pop(get, None)
                if not gets:
                    del self._waiting[key]

    def _answer(self, session: Hashable, kind: Reply, tag: int, payload: bytes = b"") -> None:
        self._reply(session, protocol.pack(kind, tag, payload))
