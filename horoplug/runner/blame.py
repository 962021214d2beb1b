"""Which of several ranks that fail one after the other is the cause. No clock and no processes of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

CAUSE_SECONDS = 2.0  # how long to wait for a rank that left before the one that failed first
LAST_WORDS_SECONDS = (
    1.0  # for ranks that learn of a failure by themselves to say what they make of it
)


class Blame:
    """The ends of ranks in, the rank that failed first out."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.running = set(ranks)
        self.codes: dict[int, int] = {}  # return codes in the order of death
        self.first: int | None = None
        """The rank that is the cause, as far as is known."""
        # Ranks that left the job before that one and have not ended yet, in that order.
        self._suspects: list[int] = []
        self._decide_at: float | None = None
        self._heard_by = 0.0  # when the others have had time for their last words

    def ended(
        self, rank: int, code: int, departures: Sequence[int], now: float, *, present: int = 0
    ) -> None:
        """A rank has ended. ``departures``: those whose connections to the rendezvous have, in that order; ``present``:
        how many still have one. Whoever has, or had one until now, learns of a failure in what all do together, and
        ends with an error that says which tensor it was: it is not ended before it could print that."""
        self.running.discard(rank)
        self.codes[rank] = code
        if self.first is None and code != 0:
            self.first = rank
            # A process takes a while to end after its last words to the others. A rank that left the job earlier than
            # the one that ended first is the more likely cause.
            if code > 0:
                earlier = [*departures, rank]
                self._suspects = [
                    other for other in earlier[: earlier.index(rank)] if other in self.running
                ]
            self._decide_at = now + CAUSE_SECONDS
            learn = present > 0 or not self.running.isdisjoint(departures)
            self._heard_by = now + LAST_WORDS_SECONDS if learn else now
        if self.first is not None:
            if rank in self._suspects:
                position = self._suspects.index(rank)
                del self._suspects[position]
                if code not in (0, -signal.SIGTERM):
                    self.first = rank
                    del self._suspects[position:]  # they left after it
            if not self._suspects:
                self._decide_at = self._heard_by if self.running else now

    def lost(self, ranks: Iterable[int]) -> None:
        """Ranks of which nothing more will be heard."""
        gone = set(ranks)
        self.running -= gone
        self._suspects = [rank for rank in self._suspects if rank not in gone]

    @property
    def due(self) -> float | None:
        """When the first is certain; None if none has failed."""
        return self._decide_at

    @property
    def code(self) -> int:
        """How it has ended, as a return code."""
        assert self.first is not None
        return self.codes[self.first]


def describe(code: int) -> str:
    """How a process has ended, from its return code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""  # a real-time signal
    return f"was killed by signal {-code}{name}"
