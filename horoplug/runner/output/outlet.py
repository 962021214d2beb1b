"""The launcher's stdout and stderr, written by threads. A terminal, reader or disk that accepts nothing therefore does
not block the launcher, which continues to handle ranks that end.

Unwritten output waits in memory. If there is too much of it, the launcher tells the agents to stop reading the ranks'
output. The ranks then block when they write, as they would on a pipe that nobody reads."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

# Unwritten bytes above which agents are told to stop reading the ranks' output, and below which they are told to
# continue.
HIGH_WATER, LOW_WATER = 1 << 20, 1 << 18
_PIECE = 4096  # bytes of one write; writes are small so that each one shows that the reader makes progress


class _Thread:
    """Writes to one file, in the order of :meth:`put`. It starts when there is something to write."""

    def __init__(self, wake: int) -> None:
        """``wake``: an eventfd, signalled when the unwritten bytes fall below :data:`LOW_WATER` or to 0."""
        self._wake = wake
        self._filled = threading.Condition()
        self._pieces: collections.deque[tuple[Descriptor, bytes]] = collections.deque()
        self._started = False
        self.waiting = 0
        """Bytes that are not written yet."""
        self.progress = 0
        """Grows with every write."""

    def put(self, descriptor: Descriptor, data: bytes) -> None:
        """Queue ``data``."""
        with self._filled:
            self._pieces.append((descriptor, data))
            self.waiting += len(data)
            self._filled.notify()
        if not self._started:
            self._started = True
            # A daemon: a write that never returns does not keep the launcher from exiting.
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._filled:
                while not self._pieces:
                    self._filled.wait()
                descriptor, data = self._pieces.popleft()
            view = memoryview(data)
            while view:
                length = descriptor.write_some(view[:_PIECE])
                length = len(view) if length is None else length
                view = view[length:]
                self._written(length)

    def _written(self, length: int) -> None:
        with self._filled:
            before = self.waiting
            self.waiting -= length
            self.progress += 1
        if self.waiting == 0 or before > LOW_WATER >= self.waiting:
            os.eventfd_write(self._wake, 1)


class Descriptor:
    """A file descriptor as a :class:`horoplug.runner.output.output.Writer` that never blocks."""

    def __init__(self, fd: int, name: str, thread: _Thread) -> None:
        self._fd = fd
        self._thread = thread
        self.name = name
        self.terminal = os.isatty(fd)
        self.error: OSError | None = None
        """The error after which nothing more is written; None if there was none."""

    @property
    def columns(self) -> int:
        """Cells in a row of the terminal, which may change; 0 if it is none."""
        try:
            return os.get_terminal_size(self._fd).columns if self.terminal else 0
        except OSError:  # the terminal has gone
            return 0

    def write(self, data: bytes) -> None:
        """Queue all of ``data``; after an error it is dropped. Errors: BrokenPipeError if the reader has ended."""
        if isinstance(self.error, BrokenPipeError):
            raise self.error
        if self.error is None and data:
            self._thread.put(self, data)

    def write_some(self, data: memoryview) -> int | None:
        """Write in the thread. Returns the number of bytes; None after an error."""
        while self.error is None:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:  # another program has made the pipe nonblocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError as error:
                self.error = error
        return None


class Outlets:
    """The launcher's stdout and stderr as :attr:`writers`. If they are the same file, their order is kept."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        """``stdout``, ``stderr``: the descriptors to write to."""
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when :attr:`congested` or the errors may have changed."""
        first = _Thread(self.wakeup)
        self._threads = [first] if _is_same_file(stdout, stderr) else [first, _Thread(self.wakeup)]
        self.writers = (
            Descriptor(stdout, "stdout", first),
            Descriptor(stderr, "stderr", self._threads[-1]),
        )
        self._reported: set[Descriptor] = set()
        self._congested = False

    @property
    def waiting(self) -> int:
        """Bytes that are not written yet."""
        return sum(thread.waiting for thread in self._threads)

    @property
    def congested(self) -> bool:
        """Whether so much is waiting that the ranks have to wait, too."""
        self._congested = self.waiting > (LOW_WATER if self._congested else HIGH_WATER)
        return self._congested

    def new_errors(self) -> list[str]:
        """A line for each stream that has failed since the last call. Errors: BrokenPipeError if a reader has ended."""
        lines = []
        for writer in self.writers:
            if isinstance(writer.error, BrokenPipeError):
                raise writer.error
            if writer.error is not None and writer not in self._reported:
                self._reported.add(writer)
                lines.append(
                    f"{writer.name}: {writer.error.strerror}; nothing more is written there"
                )
        return lines

    def flush(self, wakeup: int, patience: float | None, is_over: Callable[[], bool]) -> int:
        """Wait until everything is written. Returns the number of bytes that are not.

        ``is_over``: ends the wait when it returns true; ``wakeup``: a nonblocking descriptor that is readable when the
        result of ``is_over`` may have changed; ``patience``: seconds without progress after which the wait ends, too;
        None: no limit."""
        poll = select.poll()
        for fd in (self.wakeup, wakeup):
            poll.register(fd, select.POLLIN)
        progress, since = self._progress, time.monotonic()
        while self.waiting and not is_over():
            left = None if patience is None else since + patience - time.monotonic()
            if left is not None and left <= 0:
                break
            for fd, _ in poll.poll(None if left is None else 1000 * left + 1):
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            if self._progress != progress:
                progress, since = self._progress, time.monotonic()
        return self.waiting

    @property
    def _progress(self) -> int:
        return sum(thread.progress for thread in self._threads)


def _is_same_file(first: int, second: int) -> bool:
    try:
        return os.path.samestat(os.fstat(first), os.fstat(second))
    except OSError:  # one is closed
        return False
