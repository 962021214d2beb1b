"""Hooks of backward(), such as DDP's communication hooks, that ask for the future of an operation.

A hook adds callbacks to the future. If the future were complete by then, the callback would run in the thread of the
hook and not in that of the futures, and its operations would be in another order than on other ranks. So a future that
a hook asks for is completed only when the hook has returned."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

_DEEPEST = 12  # functions between a hook and the call of get_future()
_STANDSTILL = 0.02  # seconds


def is_of_autograd(frame: FrameType | None) -> bool:
    """Whether this is the function of PyTorch that runs backward(). None: C++ code has called, in a thread without a
    program of Python, as backward() does for a GPU."""
    return frame is None or str(frame.f_globals.get("__name__", "")).startswith("torch.autograd")


def threads_of_program() -> set[int | None]:
    """The threads that Python has started, by their identifiers."""
    return {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


def threads_in_autograd() -> list[int]:
    """The threads, by their identifiers, whose innermost function in Python runs backward()."""
    return [ident for ident, frame in sys._current_frames().items() if is_of_autograd(frame)]


class Hook:
    """A hook that runs, as the function that has asked for a future."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._thread = threading.get_ident()
        self._seen: tuple[int, int] | None = None
        self._since = 0.0

    def is_running(self) -> bool:
        """Whether the hook may still add callbacks. False also if it stands still, because it may wait for the
        future."""
        top = frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        if frame is None or top is None:
            return False
        seen, now = (id(top), top.f_lasti), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since < _STANDSTILL


def running_hook(caller: FrameType | None) -> Hook | None:
    """The hook in which ``caller`` runs; None: the program calls, or C++ code."""
    if caller is None or is_of_autograd(caller):
        return None
    frame: FrameType | None = caller
    for _ in range(_DEEPEST):
        if frame is None:
            return None
        if is_of_autograd(frame):
            return Hook(caller)
        # On GPUs, threads without a Python program run backward().
        if frame.f_back is None and frame.f_code.co_name not in ("<module>", "_bootstrap"):
            return Hook(caller)
        frame = frame.f_back
    return None
