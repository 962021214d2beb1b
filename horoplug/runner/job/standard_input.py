"""What the ranks read from their standard input.

As under mpirun, rank 0 reads what the launcher reads, and the other ranks read nothing. A command that reads its
program from there (``python -``, ``bash -s``) is different: every rank gets a copy of the program, also one that is
started later."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from horoplug.runner.checks import UsageError, reads_program

READER: Final = 0
"""The rank, or the process of an elastic job, that reads the launcher's standard input."""
_LONGEST_PROGRAM = 64 << 20
_WINDOW = 1 << 18  # bytes that are read before the rank has taken them
_CHUNK = 1 << 15
_BACKGROUND_SECONDS = 0.5  # between looks whether a background job has come to the foreground


class Input(NamedTuple):
    """What a job's ranks read."""

    program: bytes | None = None
    """The program that each rank reads; None: the command needs none."""
    is_read: bool = False
    """Whether :data:`READER` reads the launcher's standard input, by :class:`StandardInput`."""


NO_INPUT: Final = Input()


def find_input(command: Sequence[str]) -> Input:
    """What the ranks of a command read. Reads the program, if it is on standard input. Errors: UsageError."""
    program = reads_program(command)
    if sys.stdin is None or _is_null(0):  # None: the descriptor was closed when this process began
        data = b"" if program else None
    elif not program:
        return Input(is_read=True)
    elif os.isatty(0):
        raise UsageError(
            f"{program} reads its program from standard input, which is a terminal: name a script, or "
            f"redirect it ({program} - < train.py)"
        )
    else:
        data = _read_program()
    if data == b"":
        raise UsageError(
            f"{program} has nothing to run: name a script, or give it on standard input"
        )
    return Input(data)


def _read_program() -> bytes:
    data = bytearray()
    try:
        while part := os.read(0, 1 << 20):
            data += part
            if len(data) > _LONGEST_PROGRAM:
                raise UsageError(
                    f"the program on standard input has more than {_LONGEST_PROGRAM >> 20} MiB: save it to a file"
                )
    except OSError as error:
        raise UsageError(
            f"the program on standard input cannot be read: {error.strerror}"
        ) from None
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    return bytes(data)


def _is_null(fd: int) -> bool:
    """Whether a descriptor is closed, or is /dev/null."""
    try:
        status = os.fstat(fd)
    except OSError:
        return True
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev


class StandardInput:
    """Reads this process's standard input for one rank, in a thread, because a read may block at any time: another
    process may have read what was there. No more is read than a window ahead of the rank."""

    def __init__(self) -> None:
        self._room = _WINDOW
        self._changed = threading.Condition()
        self._stopped = False
        self._begun = False
        self._stop, self._stopping = socket.socketpair()
        self._woken, self._waking = socket.socketpair()
        for each in (self._woken, self._waking):
            each.setblocking(False)

    @property
    def wakeup(self) -> int:
        """A nonblocking descriptor that can be read when bytes were sent, and may wait in the connection's queue."""
        return self._woken.fileno()

    def begin(self, send: Callable[[bytes], None]) -> None:
        """Read from now on. ``send``: called with what was read, at the end with no bytes. Only the first call
        counts."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, args=(send,), daemon=True).start()

    def taken(self, count: int) -> None:
        """The rank's pipe has taken so many bytes."""
        with self._changed:
            self._room += count
            self._changed.notify_all()

    def close(self) -> None:
        """Read no more. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._stopping.shutdown(socket.SHUT_RDWR)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self, send: Callable[[bytes], None]) -> None:
        # A process in the background that reads from its terminal is stopped, unless the signal is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTIN})
        while self._has_room():
            data = self._read()
            if data is None:
                continue
            with self._changed:
                self._room -= len(data)
            send(data)
            with contextlib.suppress(BlockingIOError):
                self._waking.send(b"\0")
            if not data:
                return

    def _has_room(self) -> bool:
        """Wait until the rank has taken enough. Returns False if nothing more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._room >= _CHUNK)
            return not self._stopped

    def _read(self) -> bytes | None:
        """What can be read, no bytes at the end; None if there is nothing for now. Ends when :meth:`close` is called,
        except within a read for which another process is quicker."""
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        try:
            if not _is_foreground():
                poll.poll(_BACKGROUND_SECONDS * 1000)
                return None
            poll.register(0, select.POLLIN)
            if all(fd != 0 for fd, _ in poll.poll()) or self._stopped:
                return None
            return os.read(0, _CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EIO and os.isatty(0):  # in the background since a moment
                select.select([self._stop], [], [], _BACKGROUND_SECONDS)
                return None
            return b""


def _is_foreground() -> bool:
    """Whether this process may read its standard input: of a terminal's jobs, only the one in the foreground reads.
    Errors: OSError if the terminal is gone."""
    if not os.isatty(0):
        return True
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError as error:
        if error.errno == errno.ENOTTY:  # it is the terminal of no session, or of another one
            return True
        raise
