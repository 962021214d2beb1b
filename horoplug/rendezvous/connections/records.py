"""Records that the ranks of a job exchange through the store while they connect: one JSON object per rank and kind.

Only rank 0 reads the records of all ranks. It publishes one table with the parts that the other ranks need. So n ranks
together ask for O(n) keys, and each rank receives O(n) bytes once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from horoplug.base.errors import MissingRanksError, ProtocolError, RankTakenError, StoreTimeoutError
from horoplug.rendezvous.store.client import PendingGet, StoreClient
from horoplug.rendezvous.store.protocol import ANY_RANK

Record = dict[str, Any]


def missing_ranks(
    ranks: Sequence[int], waiter: int, seconds: float, set_by: str | None
) -> MissingRanksError:
    """The error of rank ``waiter`` if these ranks did not connect in time. ``set_by``: what sets the limit,
    None: variables."""
    set_by = set_by or "HOROVOD_START_TIMEOUT and HOROVOD_GLOO_TIMEOUT_SECONDS set"
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
    return MissingRanksError(
        ranks,
        f"{which} did not connect within {seconds:g} s (rank {waiter} has waited; {set_by} how long)",
    )


class RankRecords:
    """Publishes the records of one rank and collects those of the others, all before one deadline."""

    def __init__(
        self,
        store: StoreClient,
        prefix: str,
        rank: int,
        launched: Sequence[int],
        timeout: float,
        timeout_set_by: str | None = None,
        *,
        has_all: bool = False,
    ) -> None:
        """``prefix``: the beginning of all keys; the same on all ranks, and different in every generation.
        ``launched``: by rank, the number that the launcher gave the process, under which the store knows it.
        ``timeout``: seconds from now; ``timeout_set_by``: what sets it, for messages. ``has_all``: these are all
        processes that the store knows."""
        self.store = store
        self.prefix = prefix
        self.rank = rank
        self.launched = launched
        # Rank 0 notices the loss of any rank, but it may not be there: if a rank is lost while the ranks start, some
        # may have started, call init() again and wait for rank 0, whose own start has failed.
        self.owner_of_tables = ANY_RANK if has_all else launched[0]
        """The owner of what rank 0 publishes, for the store."""
        self.timeout = timeout
        self.timeout_set_by = timeout_set_by
        self.deadline = time.monotonic() + timeout
        self.published = False
        """Whether the other ranks may have learned of this one."""

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(self.deadline - time.monotonic(), 0)

    def key(self, kind: str, rank: int) -> str:
        """The store's key of a rank's record."""
        return f"{self.prefix}{kind}/{rank}"

    def publish(self, kind: str, record: Record) -> None:
        """Publish this rank's record. Errors: RankTakenError if another process has published as this rank."""
        if not self.store.claim(self.key(kind, self.rank), json.dumps(record).encode()):
            raise RankTakenError(
                f"rank {self.rank} of this job is already taken by another process"
            )
        self.published = True

    def collect(self, kind: str, ranks: Sequence[int]) -> dict[int, Record]:
        """The records of these ranks, as soon as all have published.

        Errors: MissingRanksError at the deadline, PeerLostError if one of the ranks ends, ProtocolError."""
        keys = [self.key(kind, rank) for rank in ranks]
        owners = [self.launched[rank] if rank else self.owner_of_tables for rank in ranks]
        try:
            values = self.store.get(keys, self.remaining, owners)
        except StoreTimeoutError as error:
            raise self.missing([ranks[i] for i in error.missing]) from None
        return {rank: _parse(rank, value) for rank, value in zip(ranks, values, strict=True)}

    def share(
        self,
        kind: str,
        record: Record,
        summarise: Callable[[dict[int, Record]], Record],
        check: Callable[[dict[int, Record]], None] | None = None,
    ) -> Record:
        """Publish this rank's record, and return the table that rank 0 makes of all records. Collective.

        ``summarise``: called on rank 0 only, with the records by rank. ``check``: called before the table exists: on
        rank 0 with the records of the other ranks, on other ranks with the record of rank 0. Errors: those of
        :meth:`publish`, :meth:`collect` and both functions."""
        self.publish(kind, record)
        if self.rank:
            if check is not None:
                check(self.collect(kind, [0]))
            return self._table(kind)
        found = self.collect(kind, range(1, len(self.launched)))
        if check is not None:
            check(found)
        # Rank 0 uses the table after a round trip through JSON, too, so that all ranks have equal values.
        table = json.dumps(summarise({0: record} | found), separators=(",", ":")).encode()
        self.store.set(self.table_key(kind), table)
        return _parse(0, table)

    def _table(self, kind: str) -> Record:
        try:
            key = self.table_key(kind)
            (value,) = self.store.get([key], self.remaining, [self.owner_of_tables])
        except StoreTimeoutError:
            raise self.missing(self.absent(kind)) from None
        return _parse(0, value)

    def table_key(self, kind: str) -> str:
        """The store's key of the table that rank 0 makes."""
        return f"{self.prefix}{kind}/table"

    def absent(self, kind: str) -> list[int]:
        """The other ranks that have not published a record; if all have, rank 0, which has not published the table."""
        others = [rank for rank in range(len(self.launched)) if rank != self.rank]
        try:
            self.store.get([self.key(kind, rank) for rank in others], 0)
        except StoreTimeoutError as error:
            return [others[i] for i in error.missing]
        return [0]

    def missing(self, ranks: Sequence[int]) -> MissingRanksError:
        """The error to raise if these ranks did not connect before the deadline."""
        launched = [self.launched[rank] for rank in ranks]
        return missing_ranks(launched, self.launched[self.rank], self.timeout, self.timeout_set_by)


class Barrier:
    """Lets ranks pass when all have arrived. Until then, the loss of any rank is an error at once.

    A context manager. Call :meth:`check` whenever the store is readable, and :meth:`wait` at the end. The barrier waits
    for :attr:`GRACE` longer than the deadline, so that a rank that has not arrived gives up first and its error names
    the ranks that it waits for."""

    GRACE = 1.0  # seconds

    def __init__(self, records: RankRecords, kind: str) -> None:
        """``kind``: of the records that ranks publish when they arrive; nothing else may use it."""
        self._records = records
        self._kind = kind
        launched = records.launched
        if records.rank:
            keys, owners = [records.table_key(kind)], [records.owner_of_tables]
        else:
            keys = [records.key(kind, rank) for rank in range(1, len(launched))]
            owners = list(launched[1:])
        seconds = records.remaining + self.GRACE
        self._waiting: PendingGet = records.store.begin_get(keys, seconds, owners)
        self._others_have_arrived = False

    def __enter__(self) -> Barrier:
        return self

    def __exit__(self, *_: object) -> None:
        self._records.store.abandon(self._waiting)

    def check(self) -> None:
        """Errors: PeerLostError if a rank is lost; StoreTimeoutError after the deadline."""
        if not self._others_have_arrived:
            self._others_have_arrived = self._records.store.poll_get(self._waiting) is not None

    def arrive(self) -> None:
        """Tell the other ranks that this one has arrived."""
        self._records.store.set(self._records.key(self._kind, self._records.rank), b"")

    def wait(self) -> None:
        """Wait until all other ranks have arrived. Errors: those of :meth:`check`."""
        store = self._records.store
        if not self._others_have_arrived:
            store.wait_get(self._waiting)
        if not self._records.rank:
            store.set(self._records.table_key(self._kind), b"")


def _parse(rank: int, value: bytes) -> Record:
    try:
        record = json.loads(value)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ProtocolError(f"rank {rank} has published something unreadable")
    return record
