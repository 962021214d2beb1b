"""Numbers that grow, for several threads."""

from __future__ import annotations

import itertools
import sysconfig
import threading
from collections.abc import Iterator

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""Whether this Python can run without a global interpreter lock."""


class LockedNumbers(Iterator[int]):
    """1, 2, 3 and so on: each number once, whichever threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1

    def __next__(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> range:
        """The next ``count`` numbers."""
        with self._lock:
            first = self._next
            self._next += count
            return range(first, self._next)


def numbers() -> Iterator[int]:
    """1, 2, 3 and so on: each number once, whichever threads ask.

    ``itertools.count`` takes less time than a lock, but gives some numbers twice without a global interpreter lock."""
    return LockedNumbers() if FREE_THREADED else itertools.count(1)


def consecutive(of: Iterator[int], count: int) -> list[int]:
    """``count`` numbers of :func:`numbers` with none of another thread between them."""
    if isinstance(of, LockedNumbers):
        return list(of.take(count))
    return list(itertools.islice(of, count))
