"""What the launcher prints: the output of the ranks, its own messages and the status line."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from horoplug.rendezvous.store.report import KEY, unpack
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.agent.agent import CONTINUE, HOLD

from .outlet import Outlets
from .output import RankOutput
from .status import Status, fit, in_foreground

_STALLED_SECONDS = 10.0  # after a failure, limit for a reader of the output that accepts nothing


class Console:
    """Prints everything that the launcher prints. Methods that print raise BrokenPipeError if a reader has ended."""

    def __init__(
        self,
        outlets: Outlets,
        size: int,
        *,
        folder: Path | None = None,
        timestamps: bool = False,
        verbose: bool = False,
        status: bool = False,
    ) -> None:
        """``size``: number of ranks; ``folder``: for the ranks' raw output; ``timestamps``: print the time before every
        line; ``verbose``: print what is passed to :meth:`say`; ``status``: show a status line, for which both streams
        must be terminals.

        Errors: OSError if the files in ``folder`` cannot be created."""
        self._outlets = outlets
        self._output = RankOutput(size, outlets.writers, folder=folder, timestamps=timestamps)
        self._verbose = verbose
        self._status = Status(size, time.monotonic()) if status else None
        self._held = False

    @property
    def wakeup(self) -> int:
        """A nonblocking descriptor that is readable when :meth:`check` may have something to do."""
        return self._outlets.wakeup

    def feed(self, rank: int, number: int, data: bytes) -> None:
        """Handle what ``rank`` has printed on its stdout (``number`` 0) or stderr (1)."""
        self._output.feed(rank, number, data)

    def add(self, rank: int) -> None:
        """Take the output of a further rank."""
        try:
            self._output.add(rank)
        except OSError as error:
            self._output.add(rank, logged=False)
            self.notice(f"{error.filename}: {error.strerror}; process {rank} has no log")

    def say(self, text: str) -> None:
        """Print a message of ``--verbose``."""
        if self._verbose:
            self.notice(text)

    def notice(self, text: str) -> None:
        """Print a message."""
        self._output.notice(f"horovodrun: {text}")

    def check(self) -> bytes | None:
        """Report the streams that have failed. Returns a command for the agents if the ranks have to wait for the
        launcher's own output (``HOLD``) or no longer have to (``CONTINUE``)."""
        for line in self._outlets.new_errors():
            self.notice(line)
        if self._outlets.congested == self._held:
            return None
        self._held = not self._held
        return HOLD if self._held else CONTINUE

    # ---- the status line ---------------------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        """The time of the next :meth:`show_status` (``time.monotonic()``); None without a status line."""
        return None if self._status is None else self._status.due

    def show_status(
        self, now: float, server: StoreServer | None, *, started: int, ended: int
    ) -> None:
        """Show the status line if it is due. ``server``: the rendezvous, None before its address is known;
        ``started``, ``ended``: number of ranks whose process was started, and has ended."""
        if self._status is None or now < self._status.due:
            return
        line = self._status.line(
            now,
            started=started,
            up=server.present() if server is not None else 0,
            ended=ended,
            counters=unpack(server.value(KEY)) if server is not None else None,
        )
        foreground = in_foreground(2)
        draw = foreground and not self._outlets.waiting  # a stopped terminal does not need it
        self._output.show_status(fit(line, 2) if foreground else "", draw=draw)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(
        self, last_line: str, wakeup: int, *, failed: bool, is_over: Callable[[], bool]
    ) -> None:
        """Print ``last_line``, unless it is empty, and wait until all output is written.

        ``failed``: a reader that accepts nothing for 10 s is given up, and a line tells how much it has lost.
        ``is_over`` ends the wait in any case; ``wakeup``: a nonblocking descriptor that is readable when it may have
        changed. A reader that has ended is no error."""
        patience = _STALLED_SECONDS if failed else None
        with contextlib.suppress(BrokenPipeError):
            self._output.close()
            if last_line:
                self.notice(last_line)
            while True:
                lost = self._outlets.flush(wakeup, patience, is_over)
                lines = self._outlets.new_errors()
                if lost or not lines:
                    break
                for line in lines:
                    self.notice(line)
            if lost:
                self.notice(f"{lost} bytes of output were not accepted and are lost")
                self._outlets.flush(wakeup, 0.1, lambda: False)
