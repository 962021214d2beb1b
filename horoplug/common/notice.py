"""Notice that this process has to leave soon, because its host is preempted, for example: a signal or a file."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

FILE_SECONDS: Final = 1.0
"""Seconds between two looks for the file."""


class Notice:
    """Whether the notice was given. The handler of the signal only sets a flag, which is read at the next commit."""

    def __init__(self) -> None:
        self._is_given = False
        self._watched: int | None = None
        self._before: Callable[[int, FrameType | None], object] | None = None
        self._file: str | None = None
        self._look_at = 0.0

    def watch(self, number: int | None, file: str | None) -> None:
        """Take this signal, and the existence of this file, for the notice. None: no signal, no file.

        A handler that the program has set for the signal is called as well. Signals are not watched outside of the main
        thread, which alone can set handlers."""
        self._file = file
        if (
            number in (None, self._watched)
            or threading.current_thread() is not threading.main_thread()
        ):
            return
        before = signal.signal(number, self._on_signal)
        self._before = before if callable(before) else None
        self._watched = number

    def is_given(self) -> bool:
        """Whether the signal has arrived, or the file exists."""
        if not self._is_given and self._file is not None:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + FILE_SECONDS
                self._is_given = os.path.exists(self._file)
        return self._is_given

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_given = True
        if self._before is not None:
            self._before(number, frame)
