"""Notice that this process has to leave soon, by a signal: its host is preempted, or its time is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Notice:
    """Whether the notice was given. The handler of the signal only sets a flag, which is read at the next commit."""

    def __init__(self) -> None:
        self.is_given = False
        self._watched: int | None = None
        self._before: Callable[[int, FrameType | None], object] | None = None

    def watch(self, number: int | None) -> None:
        """Take this signal for the notice; None: no signal is. A handler that the program has set for the signal is
        called as well. Does nothing outside of the main thread, which alone can set handlers."""
        if (
            number in (None, self._watched)
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        before = signal.signal(number, self._on_signal)
        self._before = before if callable(before) else None
        self._watched = number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_given = True
        if self._before is not None:
            self._before(number, frame)
