"""The standard input of the processes that an agent starts. A part of the agent: standard library only."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from typing import IO

_CHUNK = 1 << 16


class _Input:
    def __init__(self, stream: IO[bytes]) -> None:
        os.set_blocking(stream.fileno(), False)
        self.stream = stream
        self.unsent = bytearray()
        self.ends = False  # whether the stream is closed after the unsent bytes


class Inputs:
    """Pipes to processes, which may read slower than bytes arrive, or not at all."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_taken: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """``selector``: gets the descriptors to wait for; ``on_taken``: called with a pipe's number and the number of
        bytes that were written to it."""
        self._selector = selector
        self._on_taken = on_taken
        self._open: dict[int, _Input] = {}  # by number

    def add(self, number: int, stream: IO[bytes]) -> None:
        """Write to a pipe what arrives for this number."""
        self._open[number] = _Input(stream)

    def send(self, number: int, data: bytes) -> None:
        """Pass bytes on, or the end of the input if there are none. Unknown numbers are those of processes that have
        ended."""
        if found := self._open.get(number):
            found.unsent += data
            found.ends |= not data
            self._flush(number)

    def flush(self, fd: int) -> bool:
        """Write to a descriptor, if it belongs to one of the pipes. Returns whether it does."""
        for number, each in self._open.items():
            if not each.stream.closed and each.stream.fileno() == fd:
                self._flush(number)
                return True
        return False

    def drop(self, number: int) -> None:
        """Close a pipe without writing what is left, and forget it."""
        if found := self._open.get(number):
            found.unsent.clear()
            found.ends = True
            self._flush(number)
            del self._open[number]

    def end(self) -> None:
        """Close all pipes without writing what is left."""
        for number, each in self._open.items():
            each.unsent.clear()
            each.ends = True
            self._flush(number)

    def _flush(self, number: int) -> None:
        pipe = self._open[number]
        if pipe.stream.closed:
            return
        fd = pipe.stream.fileno()
        try:
            while pipe.unsent:
                count = os.write(fd, pipe.unsent[:_CHUNK])
                del pipe.unsent[:count]
                self._on_taken(number, count)
        except BlockingIOError:
            pass
        except OSError:  # the process has closed its end, or has ended, which is reported
            pipe.unsent.clear()
        if bool(pipe.unsent) != (fd in self._selector.get_map()):
            if pipe.unsent:
                self._selector.register(fd, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(fd)
        if pipe.ends and not pipe.unsent:
            pipe.stream.close()
