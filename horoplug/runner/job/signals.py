"""The launcher's signal handlers."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def signal_handlers(end: Handler, suspend: Handler | None = None) -> Iterator[socket.socket]:
    """Context that handles signals. Yields a nonblocking socket that is readable once a signal has arrived.

    ``end``: called for SIGINT, SIGTERM and SIGHUP, except for those that are ignored, as under ``nohup``; ``suspend``:
    called for SIGTSTP if its handler is the default one. The previous handlers are restored."""
    before = {}
    woken, wake = socket.socketpair()
    with woken, wake:
        woken.setblocking(False)
        wake.setblocking(False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
        if suspend is not None and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, suspend)
        wakeup = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
