"""Makes connections to ranks on other hosts after the start of a job, whichever end asks for them first.

Either end may dial at any time. For each lane, the lower one of the two ranks decides which connection counts:

- While the lower rank's own attempt is under way, and once it has succeeded, the lower rank refuses the connection of
  the higher one with DUPLICATE. The higher rank then waits for the lower rank's connection.
- The higher rank accepts the connection of the lower one, and drops its own attempt.
- Otherwise the newer connection of a rank replaces its older one: a rank makes another attempt only when it has given
  up the previous one.

All lanes of a rank are handed over together. Until then, nothing is read from them beyond the hello."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from horoplug.base import descriptors
from horoplug.base.errors import AuthenticationError, ProtocolError
from horoplug.rendezvous.connections.loop import REJECTED_PAUSE, RETRY_PAUSE, ConnectionLoop, Key
from horoplug.rendezvous.connections.peer_connection import Identity, PeerConnection, Refusal
from horoplug.rendezvous.connections.sockets import SPARE_INCOMING, Address

_LONGEST_PAUSE = 0.5  # seconds between two attempts
_MOST_DIALS = 256  # attempts under way at once
_GRACE = 1.0
"""Seconds beyond the time limit of the peer after which the lanes that it has made are dropped, if some are missing."""


@dataclasses.dataclass
class _Request:
    """The core has asked for a connection to a rank."""

    deadline: float
    reason: str = "it does not answer"
    """Why there is no connection yet."""
    pause: float = RETRY_PAUSE


class OnDemandConnector(ConnectionLoop):
    """Makes connections to some ranks, each at most once."""

    def __init__(
        self,
        me: Identity,
        addresses: Mapping[int, Address],
        streams: int,
        data_timeout: float,
        connected: Callable[[int, list[PeerConnection]], None],
        failed: Callable[[int, str], None],
    ) -> None:
        """``addresses``: where the ranks listen that are not connected yet; ``streams``: number of lanes to each of
        them; ``data_timeout``: seconds from a request until it fails, negative: no limit. ``connected`` is called with
        the lanes of a rank, which it then owns, ``failed`` with a line of text if a request fails."""
        super().__init__(me)
        self._addresses = dict(addresses)
        self._streams = streams
        self._limit = data_timeout if data_timeout >= 0 else math.inf
        self._on_connected = connected
        self._on_failed = failed
        self._requests: dict[int, _Request] = {}  # by rank, the oldest first
        self._partial: dict[int, float] = {}  # deadlines of ranks of which some lanes are ready
        self._settled: set[int] = set()  # ranks that were handed over or have failed
        self._queue: collections.deque[Key] = collections.deque()  # to dial as soon as possible

    @property
    def requested(self) -> list[int]:
        """The ranks that were requested and are not connected yet."""
        return list(self._requests)

    def request(self, rank: int) -> None:
        """Connect to a rank, unless that was done or has failed."""
        if rank in self._settled or rank in self._requests:
            return
        if rank not in self._addresses:
            self._on_failed(rank, "it cannot be connected to: it has no known address")
            return
        self._requests[rank] = _Request(time.monotonic() + self._limit)
        self._queue.extend((rank, lane) for lane in range(self._streams))

    def run_once(self) -> None:
        """Wait for events and handle them."""
        self._dial_queued()
        self._run_once(self._next_due())
        self._queue.extend(self._take_due())
        now = time.monotonic()
        while self._requests:
            rank, request = next(iter(self._requests.items()))
            if request.deadline > now:
                break
            self._fail(rank, request.reason, f" within {self._limit:g} s")
        while self._partial and (first := next(iter(self._partial.items())))[1] <= now:
            del self._partial[first[0]]
            if first[0] not in self._requests:
                self._complain(f"rank {first[0]} has made only some of its connections")
                self._discard(first[0])

    def _next_due(self) -> float:
        due = super()._next_due()
        if self._requests:
            due = min(due, next(iter(self._requests.values())).deadline)
        if self._partial:
            due = min(due, next(iter(self._partial.values())))
        return due

    def _dial_queued(self) -> None:
        while self._queue and len(self._outgoing) < _MOST_DIALS:
            key = self._queue.popleft()
            if key[0] in self._requests and key not in self._ready and key not in self._outgoing:
                try:
                    self._dial(key)
                except OSError as error:  # this process cannot open another socket
                    self._fail(key[0], descriptors.reason(error))

    # ---- decisions ---------------------------------------------------------------------------------------------------

    @property
    def _most_incoming(self) -> int:
        # The program needs descriptors, too.
        expected = min(len(self._addresses) * self._streams, descriptors.limit() // 4)
        return expected + SPARE_INCOMING

    def _admit(self, rank: int, lane: int, local: bool) -> Refusal | None:
        if local or rank not in self._addresses:
            return Refusal.RANK
        if lane >= self._streams:
            return Refusal.LANE
        if rank in self._settled:
            return Refusal.DUPLICATE
        if rank > self._me.rank:
            ready = self._ready.get((rank, lane))
            made_here = ready is not None and ready.target is not None
            if made_here or (rank, lane) in self._outgoing:
                return Refusal.DUPLICATE
        return None

    def _complete(self, connection: PeerConnection) -> None:
        self._forget(connection)
        assert connection.rank is not None
        rank, key = connection.rank, (connection.rank, connection.lane)
        if (own := self._outgoing.get(key)) is not None:  # the lower rank's connection counts
            self._drop(own)
        if (earlier := self._ready.pop(key, None)) is not None:  # the other rank has given it up
            earlier.close()
        self._retries.pop(key, None)
        self._ready[key] = connection
        self._partial.setdefault(rank, time.monotonic() + self._limit + _GRACE)
        keys = [(rank, lane) for lane in range(self._streams)]
        if all(each in self._ready for each in keys):
            lanes = [self._ready.pop(each) for each in keys]
            self._requests.pop(rank, None)
            del self._partial[rank]
            self._settled.add(rank)
            self._on_connected(rank, lanes)

    def _rejected(self, key: Key, error: AuthenticationError) -> None:
        self._complain(str(error))
        if request := self._requests.get(key[0]):
            request.reason = str(error)
            self._retries[key] = time.monotonic() + REJECTED_PAUSE

    def _failed(self, key: Key, error: OSError) -> None:
        if request := self._requests.get(key[0]):
            request.reason = error.strerror or str(error)
            self._retries[key] = time.monotonic() + request.pause
            request.pause = min(2 * request.pause, _LONGEST_PAUSE)

    def _violated(self, connection: PeerConnection, error: ProtocolError) -> None:
        is_duplicate = connection.refusal == Refusal.DUPLICATE
        if connection.target is None:
            if not is_duplicate:
                self._complain(str(error))
        elif is_duplicate and connection.target < self._me.rank:
            # That rank's own attempt is under way, and its connection will count.
            if request := self._requests.get(connection.target):
                request.reason = "its own connection to this rank has not been completed"
        elif connection.target in self._requests:
            self._fail(connection.target, str(error))

    # ---- failure -----------------------------------------------------------------------------------------------------

    def _fail(self, rank: int, reason: str, within: str = "") -> None:
        del self._requests[rank]
        self._settled.add(rank)
        self._discard(rank)
        self._on_failed(rank, f"it cannot be connected to{within}: {reason}")

    def _discard(self, rank: int) -> None:
        """Close what there is of the connections to a rank."""
        self._partial.pop(rank, None)
        for lane in range(self._streams):
            self._retries.pop((rank, lane), None)
            if (connection := self._outgoing.get((rank, lane))) is not None:
                self._drop(connection)
            if (ready := self._ready.pop((rank, lane), None)) is not None:
                ready.close()
