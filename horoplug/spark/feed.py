"""Gives a rank the rows of its partition: the task writes Arrow batches into a pipe, from which the rank reads them.

The pipe holds little, so that the rank's pace is that of Spark's computation of the partition, and neither side holds
the partition in memory."""

from __future__ import annotations

import io
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from .session import reason

PIPE: Final = "_HOROPLUG_SPARK_BATCHES"
"""The variable with the descriptor of the pipe."""
CHUNK_ROWS: Final = 10000
"""Rows of a batch that is made from elements of an RDD."""


class Feeder:
    """The data of one task. It serves one rank: a partition is computed once."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """``batches``: the ``pyarrow.RecordBatch`` es of the partition."""
        self._batches: Iterator[Any] = (batch for batch in batches if batch.num_rows)
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why the partition could not be computed, in one line; empty if it could."""

    def has_rows(self) -> bool:
        """Whether the partition has rows. It is computed as far as its first batch. If that fails, :attr:`problem` says
        why."""
        try:
            first = next(self._batches, None)
        except Exception as error:
            self._report(error)
            return False
        if first is None:
            return False
        self._batches = itertools.chain([first], self._batches)
        return True

    def open(self, env: dict[str, str]) -> int:
        """Returns the descriptor that the rank has to inherit, and names it in ``env``."""
        self._pipe = os.pipe()
        env[PIPE] = str(self._pipe[0])
        return self._pipe[0]

    def begin(self, kill: Callable[[], object]) -> None:
        """Begin to write: the rank has inherited the descriptor. ``kill``: ends the rank, which must not take a part of
        the partition for the whole."""
        assert self._pipe is not None
        reading, writing = self._pipe
        os.close(reading)
        self._thread = threading.Thread(target=self._write, args=(writing, kill), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until nothing is written any more: the rank has ended."""
        if self._thread is not None:
            self._thread.join()

    def _report(self, error: BaseException) -> None:
        self.problem = f"its rows cannot be computed: {reason(error)}"

    def _write(self, writing: int, kill: Callable[[], object]) -> None:
        import pyarrow as pa

        # Arrow's errors for a closed pipe differ between versions: write to a file of Python's.
        file = _Pipe(writing)
        try:
            first = next(self._batches, None)
            if first is not None:
                with pa.ipc.new_stream(pa.PythonFile(file, "w"), first.schema) as stream:
                    for batch in itertools.chain([first], self._batches):
                        stream.write_batch(batch)
                        if file.is_broken:
                            break
        except BaseException as error:
            self._report(error)
            kill()
        finally:
            os.close(writing)


class _Pipe(io.RawIOBase):
    """A pipe whose reader may end at any time; what is written then is lost."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.is_broken = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        length = len(view)
        while view and not self.is_broken:
            try:
                view = view[os.write(self._fd, view) :]
            except BrokenPipeError:
                self.is_broken = True
        return length


def received() -> Iterator[Any]:
    """The batches of this rank, in the rank."""
    import pyarrow as pa

    with os.fdopen(int(os.environ[PIPE]), "rb") as file:
        try:
            reader = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:  # nothing was written: there are no rows
            return
        yield from reader


def to_batches(elements: Iterable[Any]) -> Iterator[Any]:
    """Arrow batches of an RDD's elements: columns have the names of a Row or dict; those of a tuple or list are ``_1``,
    ``_2`` and so on, as Spark calls them; anything else is in the column ``value``."""
    import pyarrow as pa

    iterator = iter(elements)
    schema = None
    while chunk := [_record(each) for each in itertools.islice(iterator, CHUNK_ROWS)]:
        batch = pa.RecordBatch.from_pylist(chunk, schema=schema)
        schema = batch.schema
        yield batch


def _record(element: Any) -> dict[str, Any]:
    if hasattr(element, "asDict"):
        return dict(element.asDict(True))
    if isinstance(element, dict):
        return element
    if isinstance(element, (tuple, list)):
        return {f"_{number}": value for number, value in enumerate(element, 1)}
    return {"value": element}
