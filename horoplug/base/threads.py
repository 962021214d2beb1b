"""Starts threads. A process may be out of them, as it may be out of files."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any


def start(function: Callable[..., object], *args: Any, name: str | None = None) -> threading.Thread:
    """Call a function in a new thread, which does not keep the process alive.

    Errors: OSError if the limit of processes or of memory is reached, for which Python raises RuntimeError."""
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        raise OSError(
            errno.EAGAIN,
            "no further thread can be started: raise the limit of processes (ulimit -u, or pids of a container) or of "
            "memory",
        ) from None
    return thread
