"""The status line at the bottom of the launcher's terminal: how many ranks are up, since when, and their throughput.

horovodrun: 4 ranks up, 0:02:31, 312.4 MB/s in 845 tensors/s"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from horoplug.rendezvous.store.report import Counters

SECONDS = 1.0  # between two updates of the line
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def wanted(env: Mapping[str, str], terminals: Sequence[bool]) -> bool:
    """Whether to show a status line. ``terminals``: whether stdout and stderr are terminals.

    Both have to be: output in a pipe may reach the same terminal (as with ``| tee``) and would collide with the
    line."""
    return all(terminals) and env.get("TERM", "dumb") not in ("", "dumb")


def in_foreground(fd: int) -> bool:
    """Whether this process may draw on the terminal: not while it runs in the background of a shell."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # there is no job control


def fit(line: str, fd: int) -> str:
    """Cut a line so that the last column of the terminal stays free: a line that wraps could not be erased."""
    try:
        columns = os.get_terminal_size(fd).columns
    except OSError:
        columns = 0
    return line[: (columns or 80) - 1]


class Status:
    """Formats the status line and computes the throughput between updates."""

    def __init__(self, size: int, now: float) -> None:
        self._size = size
        self._begin = now
        self._last: tuple[float, Counters] | None = None
        self._rate: tuple[float, float] | None = None  # tensors and bytes per second
        self.due = now + SECONDS
        """Time of the next update (``time.monotonic()``)."""

    def line(
        self, now: float, *, started: int, up: int, ended: int, counters: Counters | None
    ) -> str:
        """The text of the line. ``started``: number of ranks whose process was started; ``up``: number of ranks that
        have called init and not left the job; ``ended``: number of ranks whose process has ended; ``counters``: the
        last report of rank 0."""
        self.due = now + SECONDS
        if started == 0:
            state = f"waiting for the hosts of {_ranks(self._size)}"
        elif up:
            state = f"{_ranks(up) if up == self._size else f'{up} of {_ranks(self._size)}'} up"
        else:  # a program that does not use horoplug, or has not called init yet
            running = started - ended
            state = f"{running} process{'' if running == 1 else 'es'}"
        if ended:
            state += f", {ended} ended"
        self._count(now, counters if up else None)
        return f"horovodrun: {state}, {_elapsed(now - self._begin)}{self._work()}"

    def _count(self, now: float, counters: Counters | None) -> None:
        if counters is None or (self._last and counters.bytes < self._last[1].bytes):
            self._last = self._rate = (
                None  # no report yet, or the counters restarted with a new init
            )
        if counters is None:
            return
        if self._last is not None:
            then, before = self._last
            if counters == before and now - then < 2.5 * SECONDS:
                return  # there may have been no new report
            seconds = now - then
            self._rate = (
                (counters.tensors - before.tensors) / seconds,
                (counters.bytes - before.bytes) / seconds,
            )
        self._last = now, counters

    def _work(self) -> str:
        if self._rate is None:
            return ""
        tensors, volume = self._rate
        factor, unit = next((each for each in _UNITS if volume >= each[0]), _UNITS[-1])
        return f", {volume / factor:.1f} {unit}/s in {tensors:.0f} tensors/s"


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
