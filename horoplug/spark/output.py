"""Writes the ranks' output to streams of the caller, which may be a notebook's."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from horoplug.runner.output.output import RankOutput


class Output:
    """The output of all ranks, each line with its rank before it."""

    def __init__(
        self, size: int, stdout: Any, stderr: Any, *, timestamps: bool, verbose: int
    ) -> None:
        """``size``: ranks from the beginning; ``stdout``, ``stderr``: files, None: ``sys.stdout`` and ``sys.stderr``;
        ``timestamps``: print the time before every line; ``verbose``: from 2 on, print what :meth:`say` gets."""
        writers = _Writer(stdout or sys.stdout), _Writer(stderr or sys.stderr)
        self._output = RankOutput(size, writers, timestamps=timestamps)
        self._known = set(range(size))
        self._verbose = verbose
        self._errors = writers[1]

    def feed(self, number: int, stream: int, data: bytes) -> None:
        """A rank has printed something on its stdout (``stream`` 0) or stderr (1)."""
        if number not in self._known:
            self._known.add(number)
            self._output.add(number)
        self._output.feed(number, stream, data)

    def say(self, text: str) -> None:
        """Print a line of the job itself, if it is verbose."""
        if self._verbose >= 2:
            self._errors.write(f"horoplug.spark: {text}\n".encode())

    def close(self) -> None:
        """Write incomplete lines."""
        self._output.close()


class _Writer:
    """A text or binary file as a :class:`horoplug.runner.output.output.Writer`. The job goes on if writing fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        with contextlib.suppress(Exception):
            self.terminal = bool(stream.isatty())
            return
        self.terminal = False

    @property
    def columns(self) -> int:
        """Cells in a row of the terminal; 0 if it is none."""
        with contextlib.suppress(Exception):
            return os.get_terminal_size(self._stream.fileno()).columns if self.terminal else 0
        return 0

    def write(self, data: bytes) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            try:
                text = data.decode("utf-8", "backslashreplace")
                encoding = getattr(self._stream, "encoding", None) or "utf-8"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except TypeError:
                self._stream.write(data)
            self._stream.flush()
