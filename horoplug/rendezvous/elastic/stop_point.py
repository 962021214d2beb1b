"""How the processes of an elastic job agree, without a message while nothing changes, at which of their checks for new
hosts all of them stop.

All members of a membership make the same checks, at the same points of their programs, and a member is rarely more
than one check ahead of another one. They must stop at the same check: a member that went on would wait for operations
of members that have stopped. A *round* of the agreement:

    member                                       launcher
                                        <-       "there is an update"
    "I have made c checks"              ->
                                        <-       "stop at check s", where s = 1 + the largest c

From its message until the answer, a member's next check waits. So no member makes more than c + 1 <= s checks before it
knows s, and all stop at check s. A thread of each member sends the message, whatever the program does meanwhile: a
member that waits in a check waits only for threads, and never for a member's program, which may in turn be waiting for
this one in an operation.

A round that cannot end, because a member ends or does not answer, is called off: no member stops, and their checks go
on. If the launcher does not answer, the check fails: the membership is over, and its members wait for the next one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from horoplug.base.errors import HorovodInternalError

VOTE_SECONDS: Final = 10.0
"""A round in which a member has not answered for so long is called off."""
PAUSE_SECONDS: Final = 30.0
"""Seconds until the next round after one that was called off."""
DECISION_SECONDS: Final = 60
"""Seconds that a check waits for the launcher, which decides within VOTE_SECONDS."""


class StopPoint:
    """A member's part: counts its checks, and knows at which of them to stop. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._checks = 0
        self._is_undecided = False
        self._stop: int | None = None

    def announce(self) -> int:
        """There is an update: the next check waits for :meth:`decide`. Returns the number of checks so far."""
        with self._changed:
            self._is_undecided = True
            return self._checks

    def decide(self, stop: int | None) -> None:
        """Stop at this check; None: the round was called off."""
        with self._changed:
            self._is_undecided = False
            self._stop = stop
            self._changed.notify_all()

    def check(self) -> bool:
        """Make one more check. Returns whether to stop at it. Errors: HorovodInternalError if the launcher does not
        decide."""
        with self._changed:
            self._checks += 1
            # Second by second, so that the time in which this process is suspended does not count.
            for _ in range(DECISION_SECONDS):
                if not self._is_undecided:
                    break
                self._changed.wait(1.0)
            if self._is_undecided:
                raise HorovodInternalError(
                    f"horovodrun has not said for {DECISION_SECONDS} s whether the processes stop at this commit; "
                    "is it suspended?"
                )
            return self._checks == self._stop


class Announce(NamedTuple):
    """Tell all members that there is an update."""

    round: int


class Decide(NamedTuple):
    """Tell all members at which check to stop; None: the round was called off."""

    round: int
    stop: int | None


class StopVote:
    """The launcher's part: collects the numbers of checks, and decides. No I/O and no clock."""

    def __init__(self, members: tuple[int, ...], now: float) -> None:
        """``members``: the numbers of the processes that vote; ``now``: seconds of a monotonic clock."""
        self._members = frozenset(members)
        self._round = 0
        self._checks: dict[int, int] = {}
        self._announced = False
        self._due: float | None = (
            now  # when the round begins, or is called off; None: the vote is over
        )

    @property
    def due(self) -> float | None:
        """When :meth:`advance` next has something to do although nobody has voted; None: never."""
        return self._due

    @property
    def unused_round(self) -> int:
        """The first round that was not announced."""
        return self._round + self._announced

    def count(self, process: int, round_number: int, checks: int) -> None:
        """A member has made so many checks."""
        if round_number == self._round and process in self._members:
            self._checks[process] = checks

    def advance(self, now: float) -> Iterator[Announce | Decide]:
        """What to tell the members now."""
        if self._due is None:
            return
        if self._announced and self._checks.keys() == self._members:
            self._due = None
            yield Decide(self._round, 1 + max(self._checks.values()))
        elif now >= self._due:
            if self._announced:
                yield from self._call_off()
                self._due = now + PAUSE_SECONDS
            else:
                self._announced = True
                self._due = now + VOTE_SECONDS
                yield Announce(self._round)

    def end(self) -> Iterator[Announce | Decide]:
        """The membership is over, or a member has ended: what to tell the others."""
        if self._due is not None:
            self._due = None
            if self._announced:
                yield from self._call_off()

    def _call_off(self) -> Iterator[Decide]:
        yield Decide(self._round, None)
        self._announced = False
        self._round += 1
        self._checks.clear()
