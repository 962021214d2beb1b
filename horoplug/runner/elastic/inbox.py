"""Events of other threads for the launcher's loop, and the thread that searches for hosts."""

from __future__ import annotations

import collections
import contextlib
import math
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from .discovery import HostDiscovery

DISCOVERY_SECONDS: Final = 1.0
"""Seconds between two searches for hosts."""


class Inbox:
    """Events of other threads for the launcher's loop."""

    def __init__(self) -> None:
        self._events: collections.deque[Any] = collections.deque()
        self._in, self._out = socket.socketpair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        """A nonblocking descriptor that is readable when there may be events."""
        return self._in.fileno()

    def put(self, event: Any) -> None:
        """Add an event, in any thread."""
        self._events.append(event)
        with contextlib.suppress(OSError):  # full, so that the loop wakes up; or closed
            self._out.send(b"e")

    def take(self) -> Iterator[Any]:
        """Remove and yield the events."""
        while self._events:
            yield self._events.popleft()

    def wait(self, seconds: float | None) -> None:
        """Wait until there may be events, at most ``seconds``; None: without a limit."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        poll.poll(None if seconds is None else math.ceil(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            while self._in.recv(1 << 12):
                pass

    def close(self) -> None:
        """Close the descriptors."""
        self._in.close()
        self._out.close()


class DiscoveryThread:
    """Searches for hosts in a thread, because a script takes its time."""

    def __init__(self, discovery: HostDiscovery, found: Callable[[object], object]) -> None:
        """``found``: called, in the thread, with the hosts and their slots, or with an exception."""
        self._discovery = discovery
        self._found = found
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horoplug-discovery", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._found(self._discovery.find_available_hosts_and_slots())
            except Exception as error:
                self._found(error)
            except BaseException as error:  # SystemExit would end the thread without a word
                self._found(RuntimeError(f"it has raised {error!r}"))
            self._over.wait(DISCOVERY_SECONDS)

    def close(self) -> None:
        """Search no more. A script that runs is not waited for: it ends with the launcher."""
        self._over.set()
