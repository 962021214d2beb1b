"""Records that the ranks of a job exchange through the store while they connect: one JSON object per rank and kind."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from horoplug.base.errors import (
    MissingRanksError,
    ProtocolError,
    RankTakenError,
    StoreTimeoutError,
)
from horoplug.rendezvous.store.client import StoreClient

Record = dict[str, Any]


class RankRecords:
    """Publishes the records of one rank and collects those of the others, all before one deadline."""

    def __init__(
        self, store: StoreClient, prefix: str, rank: int, launched: Sequence[int], timeout: float
    ) -> None:
        """``prefix``: of all keys; the same on all ranks, and different in every generation. ``launched``: by rank, the
        number that the process was launched with, under which the store knows it. ``timeout``: seconds from now."""
        self.store = store
        self.prefix = prefix
        self.rank = rank
        self.launched = launched
        self.timeout = timeout
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
        try:
            values = self.store.get(keys, self.remaining, [self.launched[r] for r in ranks])
        except StoreTimeoutError as error:
            raise self.missing([ranks[i] for i in error.missing]) from None
        return {rank: _parse(rank, value) for rank, value in zip(ranks, values, strict=True)}

    def missing(self, ranks: Sequence[int]) -> MissingRanksError:
        """The error to raise if these ranks did not connect before the deadline."""
        launched = [self.launched[rank] for rank in ranks]
        which = f"rank {launched[0]}" if len(launched) == 1 else f"ranks {launched}"
        return MissingRanksError(
            launched,
            f"{which} did not connect within {self.timeout:g} s (rank {self.launched[self.rank]} has waited; "
            "HOROVOD_START_TIMEOUT and HOROVOD_GLOO_TIMEOUT_SECONDS set how long)",
        )


def _parse(rank: int, value: bytes) -> Record:
    try:
        record = json.loads(value)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ProtocolError(f"rank {rank} has published something unreadable")
    return record
