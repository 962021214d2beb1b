"""Merges the output of all ranks into the launcher's own output, line by line, with the rank before every line.

Example: ``[1]<stdout>:text``. Lines are written as a whole, so that they never mix; a last line without a newline gets
one. Progress bars redraw a line with a carriage return:
- on a terminal, the bar of one rank at a time stays below the other output, cut to one row, and other bars only show
  their final state; without a bar, the launcher's status line may stand there;
- in a file or pipe, the states of a bar become lines: at most one per second and stream, and always the last one."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import BinaryIO, Protocol

from horoplug.base.private_file import open_private_file

from .cells import fit

STREAMS = ("stdout", "stderr")
MAX_LINE = 1 << 20  # bytes; longer lines are broken, to bound the launcher's memory
BAR_SECONDS = 1.0  # between two lines of a progress bar in a file or pipe
_CLEAR = b"\r\x1b[K"


class Writer(Protocol):
    """The destination of one of the launcher's streams."""

    terminal: bool

    @property
    def columns(self) -> int:
        """Cells in a row of the terminal; 0 if they are not known."""

    def write(self, data: bytes) -> None:
        """Write all of ``data``. Errors: OSError, in particular BrokenPipeError."""


@dataclasses.dataclass
class _Log:
    """The file with the raw output of one stream of a rank. It ends with the first error, such as a full disk."""

    path: Path
    file: BinaryIO
    error: OSError | None = None

    def write(self, data: bytes) -> None:
        """Write all of ``data``, or set :attr:`error`."""
        view = memoryview(data)
        try:
            while view and self.error is None:
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Close the file. A network file system may only now report that it is full."""
        try:
            self.file.close()
        except OSError as error:
            self.error = self.error or error


@dataclasses.dataclass
class _RankStream:
    prefix: str
    writer: Writer
    file: _Log | None
    partial: bytes = b""
    shown: float = float("-inf")  # when a state of its progress bar was last shown


class RankOutput:
    """The output of all ranks. ``writers``: the launcher's stdout and stderr."""

    def __init__(
        self,
        size: int,
        writers: tuple[Writer, Writer],
        *,
        folder: Path | None = None,
        timestamps: bool = False,
    ) -> None:
        """``folder``: also write each rank's raw output to ``folder/rank.<zero-padded>/stdout`` and ``stderr``.

        ``timestamps``: print the time before every line. Errors: OSError if those files cannot be created."""
        self._timestamps = timestamps
        self._streams: dict[tuple[int, int], _RankStream] = {}
        self._live: tuple[_RankStream, bytes] | None = None  # the progress bar on the terminal
        self._errors = writers[1]
        self._status = b""  # the launcher's status line, shown if there is no bar
        self._writers = writers
        self._folder = folder
        self._width = len(str(size - 1))
        for rank in range(size):
            self.add(rank)

    def add(self, rank: int, *, logged: bool = True) -> None:
        """Take the output of a further rank. ``logged``: whether it has files, if there is a folder for them. Errors:
        OSError if these cannot be created."""
        for number, name in enumerate(STREAMS):
            file: _Log | None = None
            if self._folder is not None and logged:
                place = self._folder / f"rank.{rank:0{self._width}d}"
                place.mkdir(parents=True, exist_ok=True)
                # Output may contain secrets.
                opened = os.fdopen(open_private_file(place / name), "wb", buffering=0)
                file = _Log(place / name, opened)
            stream = _RankStream(f"[{rank}]<{name}>:", self._writers[number], file)
            self._streams[rank, number] = stream

    def feed(self, rank: int, number: int, data: bytes) -> None:
        """Handle what ``rank`` has printed on its stdout (``number`` 0) or stderr (1)."""
        stream = self._streams[rank, number]
        if stream.file is not None:
            self._log(stream.file, data)
        lines = (stream.partial + data).split(b"\n")
        stream.partial = lines.pop()
        ready = b"".join([self._line(stream, line) for line in lines])
        if len(stream.partial) > MAX_LINE:
            ready += self._line(stream, stream.partial)
            stream.partial = b""
        if ready:
            self._end_bar(stream)
            self._write(stream, ready)
        if b"\r" in stream.partial:
            self._redraw(stream)

    def show_status(self, text: str, draw: bool = True) -> None:
        """Set the status line at the bottom of stderr's terminal; an empty text removes it.

        stderr must be a terminal. Without ``draw``, the change shows with the next output."""
        before, self._status = self._status, text.encode("utf-8", "backslashreplace")
        if draw and self._live is None and (before or self._status):
            self._errors.write(_CLEAR + fit(self._status, self._errors.columns))

    def close(self) -> None:
        """Write incomplete lines, and close the files. If several of these are incomplete, a line tells how many."""
        self.show_status("")
        for stream in self._streams.values():
            if stream.partial.strip(b"\r"):
                self._end_bar(stream)
                self._write(stream, self._line(stream, stream.partial))
            stream.partial = b""
        for log in [stream.file for stream in self._streams.values() if stream.file is not None]:
            log.close()
        broken = self._broken_logs
        if broken > 1:
            self.notice(f"horovodrun: {broken} logs of ranks are incomplete")

    def notice(self, text: str) -> None:
        """Write a line of the launcher itself to stderr."""
        for (_, number), stream in self._streams.items():
            if number == 1:
                self._write(stream, text.encode("utf-8", "backslashreplace") + b"\n")
                return

    # ---- the ranks' files --------------------------------------------------------------------------------------------

    @property
    def _broken_logs(self) -> int:
        logs = [stream.file for stream in self._streams.values()]
        return sum(log is not None and log.error is not None for log in logs)

    def _log(self, log: _Log, data: bytes) -> None:
        """Write to a rank's file. Only the first one that fails is reported: others fail for the same reason."""
        if log.error is not None:
            return
        log.write(data)
        if log.error is not None and self._broken_logs == 1:
            self.notice(f"horovodrun: {log.path}: {log.error.strerror}; this log ends here")

    # ---- lines and bars ----------------------------------------------------------------------------------------------

    def _line(self, stream: _RankStream, line: bytes) -> bytes:
        """A line as it is shown: the last state of a line that was redrawn."""
        states = [state for state in line.split(b"\r") if state]
        return self._prefix(stream) + (states[-1] if states else b"") + b"\n"

    def _redraw(self, stream: _RankStream) -> None:
        """Show the newest state of a stream's progress bar, if the terminal is free, or a line is due in a file."""
        states = [state for state in stream.partial.split(b"\r") if state.strip()]
        if not states:
            return
        # Keep only the newest state. The text after the last carriage return may not be complete yet.
        stream.partial = b"\r" + states[-1] + (b"\r" if stream.partial.endswith(b"\r") else b"")
        if stream.writer.terminal:
            if self._live is None or self._live[0] is stream:
                self._live = stream, self._prefix(stream) + states[-1]
                stream.writer.write(_CLEAR + fit(self._live[1], stream.writer.columns))
        elif time.monotonic() - stream.shown >= BAR_SECONDS:
            stream.shown = time.monotonic()
            stream.writer.write(self._prefix(stream) + states[-1] + b"\n")

    def _end_bar(self, stream: _RankStream) -> None:
        if self._live is not None and self._live[0] is stream:
            self._live = None
            stream.writer.write(_CLEAR)

    def _write(self, stream: _RankStream, data: bytes) -> None:
        """Write whole lines above the progress bar or status line."""
        if self._live is not None:
            writer, bottom = self._live[0].writer, self._live[1]
        else:
            writer, bottom = self._errors, self._status
        if not bottom or not stream.writer.terminal:
            stream.writer.write(data)
            return
        writer.write(_CLEAR)
        stream.writer.write(data)
        writer.write(fit(bottom, writer.columns))

    def _prefix(self, stream: _RankStream) -> bytes:
        when = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        return (when + stream.prefix).encode()
