"""Finds the rank that failed first when several ranks fail one after the other. No clock and no I/O."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

# Limit to wait for the end of ranks that left the job before the rank that was the first to fail, and for the end of
# that rank's host.
CAUSE_SECONDS = 2.0
# Time for the other ranks to print the error that they raise because of the failure.
LAST_WORDS_SECONDS = 1.0


class Blame:
    """Takes the ends of ranks and decides which rank failed first."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.running = set(ranks)
        self.codes: dict[int, int] = {}  # return codes, in the order in which the processes ended
        self.first: int | None = None
        """The rank that failed first, as far as is known; None if none has failed."""
        # Ranks that left the job before :attr:`first` and have not ended yet, in the order in which they left.
        self._suspects: list[int] = []
        self._decide_at: float | None = None
        # When the other ranks have had time to print their errors, and the host's loss time to be noticed.
        self._heard_by = 0.0

    def ended(
        self,
        rank: int,
        code: int,
        departures: Sequence[int],
        now: float,
        *,
        present: int = 0,
        may_be_lost: bool = False,
    ) -> None:
        """A rank's process has ended.

        ``code``: its return code; ``departures``: ranks whose connections to the rendezvous have ended, in that order;
        ``now``: ``time.monotonic()``; ``present``: number of ranks that are still connected. These ranks, and those
        that have just left, learn of the failure in a collective operation and print an error that names the tensor.
        The decision waits for that. ``may_be_lost``: whatever has killed the rank may be killing its host's agent, too.
        The decision waits for that as well, because the loss of the host is then the better cause."""
        self.running.discard(rank)
        self.codes[rank] = code
        if self.first is None and code != 0:
            self.first = rank
            # A process takes a while to end after it has left the job. A rank that left before this one is therefore
            # the more likely cause, even if this process ended first.
            if code > 0:
                earlier = [*departures, rank]
                self._suspects = [
                    other for other in earlier[: earlier.index(rank)] if other in self.running
                ]
            self._decide_at = now + CAUSE_SECONDS
            learn = present > 0 or not self.running.isdisjoint(departures)
            self._heard_by = now + LAST_WORDS_SECONDS if learn else now
            if may_be_lost:
                self._heard_by = now + CAUSE_SECONDS
        if self.first is not None:
            if rank in self._suspects:
                position = self._suspects.index(rank)
                del self._suspects[position]
                if code not in (0, -signal.SIGTERM):
                    self.first = rank
                    del self._suspects[position:]  # the other suspects left after this rank
            if not self._suspects:
                self._decide_at = self._heard_by if self.running else now

    def lost(self, ranks: Iterable[int]) -> None:
        """These ranks' ends will not be reported: their host is lost, or they are being ended."""
        gone = set(ranks)
        self.running -= gone
        self._suspects = [rank for rank in self._suspects if rank not in gone]

    @property
    def due(self) -> float | None:
        """When :attr:`first` is final; None if no rank has failed."""
        return self._decide_at

    @property
    def code(self) -> int:
        """The return code of the rank that failed first."""
        assert self.first is not None
        return self.codes[self.first]


def was_killed(code: int) -> bool:
    """Whether this return code is that of a process, or of a shell's child, that SIGKILL has ended."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def describe(code: int) -> str:
    """How a process with this return code has ended, for messages."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""  # a real-time signal
    return f"was killed by signal {-code}{name}"
