"""Finds the processes of an elastic job that are slower than the others. No I/O and no clock.

In training, each step of every process takes equally long, because all wait for the slowest one. What differs is how
long they have operations in flight: a fast process submits its gradients early and waits for the others. The rest of
its time, in which it has none in flight, is called its *computing* time here. The process that waits least tells how
long communication takes by itself."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Final, NamedTuple

LEAST_SHARE: Final = 0.2
"""A process is not slow if it computes for a smaller part of its time."""
WINDOWS: Final = 2
"""A process is slow if it was so for this number of windows in a row."""


class Pacing(NamedTuple):
    """What the user wants to know of slow processes. ``factor``: how many times as long as the others a process has to
    compute to be reported; ``seconds``: of a window; ``replaced``: the factor from which on it is replaced. A factor of
    0: no process is."""

    factor: float = 0.0
    seconds: float = 30.0
    replaced: float = 0.0

    def watch(self, members: tuple[int, ...]) -> Stragglers | None:
        """The paces of the processes of a membership; None: nobody wants to know them."""
        factors = [factor for factor in (self.factor, self.replaced) if factor]
        return Stragglers(members, min(factors), self.seconds) if factors else None


@dataclasses.dataclass(frozen=True)
class Slow:
    """A process that is slow, and its times in a window, in seconds. ``others``: the median computing time of the other
    processes; ``factor``: how many times longer this one computes."""

    process: int
    window: float
    computing: float
    waiting: float
    communicating: float
    others: float
    factor: float

    def __str__(self) -> str:
        return (
            f"in the last {self.window:.1f} s it computed for {self.computing:.1f} s, waited for {self.waiting:.1f} s "
            f"and communicated for {self.communicating:.1f} s; the others computed for {self.others:.1f} s"
        )


@dataclasses.dataclass
class _Clock:
    begin: tuple[float, float] = (
        0.0,
        0.0,
    )  # elapsed and active seconds at the beginning of the window
    now: tuple[float, float] = (0.0, 0.0)
    slow_windows: int = 0


class Stragglers:
    """The paces of the processes of one membership."""

    def __init__(self, members: tuple[int, ...], factor: float, seconds: float) -> None:
        """``factor``: how many times as long as the others a slow process computes; ``seconds``: of a window."""
        self._factor = factor
        self._seconds = seconds
        self._clocks = {process: _Clock() for process in members}

    def report(self, process: int, elapsed: float, active: float) -> list[Slow]:
        """A process has existed for ``elapsed`` seconds, and had operations in flight for ``active`` of them.

        Returns the processes that were found to be slow by that, each once until it was not slow for a window."""
        clock = self._clocks.get(process)
        if clock is None or len(self._clocks) < 2:
            return []
        clock.now = elapsed, active
        if any(clock.now[0] - clock.begin[0] < self._seconds for clock in self._clocks.values()):
            return []
        return list(self._end_window())

    def _end_window(self) -> Iterator[Slow]:
        lengths, actives = {}, {}
        for process, clock in self._clocks.items():
            lengths[process] = clock.now[0] - clock.begin[0]
            actives[process] = clock.now[1] - clock.begin[1]
            clock.begin = clock.now
        # The windows of the processes are not exactly equally long.
        shares = {process: 1 - actives[process] / lengths[process] for process in lengths}
        least = 1 - max(shares.values())
        for process, clock in self._clocks.items():
            others = statistics.median(shares[each] for each in shares if each != process)
            if shares[process] < max(LEAST_SHARE, self._factor * others):
                clock.slow_windows = 0
                continue
            clock.slow_windows += 1
            if clock.slow_windows == WINDOWS:
                window = lengths[process]
                yield Slow(
                    process,
                    window,
                    computing=window * shares[process],
                    waiting=window * (1 - shares[process] - least),
                    communicating=window * least,
                    others=window * others,
                    factor=shares[process] / max(others, 1e-9),
                )
