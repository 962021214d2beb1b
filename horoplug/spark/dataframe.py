"""``horoplug.spark.run_on_dataframe``: each rank trains on a partition, which it reads as batches of Arrow."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from .barrier import BarrierJob, Options, start_timeout_of
from .feed import Feeder, received, to_batches
from .run import name_of, packed
from .service import executable_of
from .session import INSTALL, active_context, is_dynamic, require_slots
from .tasks import Ticket, serve

__all__ = ["run_on_dataframe"]

_UNEVEN: Final = ("join", "equal")


def run_on_dataframe(
    df: Any,
    train_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    batch_size: int | None = None,
    uneven: str = "join",
    repartition: bool = True,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call ``train_fn(batches, *args, **kwargs)`` on ``num_proc`` ranks at once, and return the results by rank.

    ``batches`` is an iterator of ``pyarrow.RecordBatch`` with the rows of the rank's partition of ``df``, a DataFrame
    or an RDD. They come from the executor while Spark computes them; nothing is collected in the driver, and no rank
    holds its partition in memory. The iterator can be read once. An RDD's elements are Rows or dicts, whose names are
    the columns, tuples (columns ``_1``, ``_2``, ...) or other values (column ``value``).

    ``num_proc``: None: ``spark.default.parallelism``, with ``repartition=False`` the number of partitions;
    ``batch_size``: rows of each batch, of which the last one may have fewer; None: as Spark makes them
    (``spark.sql.execution.arrow.maxRecordsPerBatch``). ``repartition``: spread the rows evenly over ``num_proc``
    partitions, by a shuffle; False: take the partitions as they are, of which there have to be ``num_proc``.

    ``uneven``: what happens when a rank's batches end before those of others. ``"join"``: the iterator calls
    ``join()``, in which the rank takes part in the others' operations without data until the last one has ended.
    ``"equal"``: all ranks end with the first one, and the rest is not used; the ranks agree before each batch. Both
    count on ``init()`` before the first batch, and on reading up to the end.

    The other arguments are those of :func:`horoplug.spark.run.run`; ``start_timeout`` is in seconds. Raises its
    exceptions, ValueError for data without rows, and RankError if a partition cannot be computed.

    Example, with an active Spark session:

        import pyspark.sql

        def count(batches):
            import horoplug as hvd

            hvd.init()
            return sum(batch.num_rows for batch in batches)

        frame = pyspark.sql.SparkSession.getActiveSession().range(10)
        sum(horoplug.spark.run_on_dataframe(frame, count, num_proc=2))  # -> 10
    """
    caller = "run_on_dataframe"
    context = active_context()
    if uneven not in _UNEVEN:
        raise ValueError(f"horoplug.spark.{caller}: uneven={uneven!r}: one of {', '.join(_UNEVEN)}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"horoplug.spark.{caller}: batch_size={batch_size}: at least 1 is wanted")
    _need_pyarrow()
    is_frame = hasattr(df, "mapInArrow")
    if not is_frame and not hasattr(df, "mapPartitions"):
        raise TypeError(
            f"horoplug.spark.{caller} wants a DataFrame or an RDD, not {type(df).__name__}"
        )
    seconds = start_timeout_of(start_timeout)
    function = packed(caller, train_fn, args, kwargs)
    function = packed(caller, _OnBatches(function, uneven, batch_size), (), {})
    if num_proc is not None:
        size = num_proc
    elif repartition:
        size = context.defaultParallelism
    else:
        size = (df.rdd if is_frame else df).getNumPartitions()
    dynamic = is_dynamic(context)
    if not dynamic:
        require_slots(context, size, seconds)
    data = df.repartition(size) if repartition else df
    action = (_on_frame if is_frame else _on_rdd)(data, together=not dynamic)
    options = Options(
        start_timeout=seconds,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        timestamps=prefix_output_with_timestamp,
        executable=executable_of(executable),
    )
    description = f"horoplug.spark.{caller}({name_of(train_fn)})"
    return BarrierJob(
        *(context, size, function, action, options), description=description, needs_rows=True
    ).run()


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(f"horoplug.spark.run_on_dataframe needs pyarrow: {INSTALL}") from error


# ---- jobs of Spark ---------------------------------------------------------------------------------------------------


def _on_frame(frame: Any, *, together: bool) -> Callable[[Ticket], object]:
    if "barrier" not in inspect.signature(frame.mapInArrow).parameters:
        raise RuntimeError(
            "horoplug.spark.run_on_dataframe: DataFrames need Spark 3.5: pass df.rdd"
        )

    def action(ticket: Ticket) -> object:
        def task(batches: Iterator[Any]) -> Iterator[Any]:
            serve(ticket, Feeder(iter(batches)))
            return iter(())

        return frame.mapInArrow(task, "rank int", barrier=together).collect()

    return action


def _on_rdd(rdd: Any, *, together: bool) -> Callable[[Ticket], object]:
    def action(ticket: Ticket) -> object:
        def task(elements: Iterator[Any]) -> Iterator[Any]:
            serve(ticket, Feeder(to_batches(elements)))
            return iter(())

        return (rdd.barrier() if together else rdd).mapPartitions(task).collect()

    return action


# ---- in the ranks ----------------------------------------------------------------------------------------------------


class _OnBatches:
    """The function of a rank: calls the user's with its batches."""

    def __init__(self, function: bytes, uneven: str, batch_size: int | None) -> None:
        """``function``: the user's, from :func:`horoplug.runner.functions.run_task.pack`."""
        self._function = function
        self._uneven = uneven
        self._batch_size = batch_size

    def __call__(self) -> Any:
        from horoplug.runner.functions.run_task import unpack

        function, args, kwargs = unpack(self._function)
        batches = received()
        if self._batch_size is not None:
            batches = _of_size(batches, self._batch_size)
        end = _joined_at_the_end if self._uneven == "join" else _equally_many
        return function(end(batches), *args, **kwargs)


def _of_size(batches: Iterator[Any], rows: int) -> Iterator[Any]:
    """Batches of ``rows`` rows each, but for the last one."""
    import pyarrow as pa

    parts: list[Any] = []
    missing = rows
    for batch in batches:
        while batch.num_rows >= missing:
            yield _concatenated(pa, [*parts, batch.slice(0, missing)])
            batch = batch.slice(missing)
            parts, missing = [], rows
        if batch.num_rows:
            parts.append(batch)
            missing -= batch.num_rows
    if parts:
        yield _concatenated(pa, parts)


def _concatenated(pa: Any, parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]


def _joined_at_the_end(batches: Iterator[Any]) -> Iterator[Any]:
    import horoplug

    yield from batches
    if horoplug.is_initialized():
        horoplug.join()


def _equally_many(batches: Iterator[Any]) -> Iterator[Any]:
    import numpy as np

    import horoplug

    if not horoplug.is_initialized():
        raise RuntimeError(
            'horoplug.spark.run_on_dataframe: uneven="equal": call hvd.init() before the first batch is read'
        )
    while True:
        batch = next(batches, None)
        mine = np.array([batch is not None], dtype=np.uint8)
        if not horoplug.allreduce(mine, op=horoplug.Min, name="horoplug.spark.batches")[0]:
            return
        yield batch
