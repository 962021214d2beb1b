"""``horoplug.spark.run``: a function on the executors of a Spark application, one rank in each task."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horoplug.base.pickling import why_not
from horoplug.runner.functions.run_task import pack

from .barrier import BarrierJob, Options, start_timeout_of
from .service import executable_of
from .session import active_context, is_dynamic, require_slots
from .tasks import Ticket, serve

__all__ = ["run"]


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` ranks at once, and return the results by rank.

    The ranks are the tasks of one barrier job of the active Spark application, each in a child process of Spark's
    Python worker; with dynamic allocation, for which Spark refuses barrier jobs, they are ordinary tasks. ``num_proc``:
    None: ``spark.default.parallelism``; ``start_timeout``: seconds until all tasks have started, None:
    HOROVOD_SPARK_START_TIMEOUT or 600; ``env``: variables for the ranks, in addition to those of Spark's workers and
    the driver's ``HOROVOD_*`` and ``HOROPLUG_*``; ``stdout``, ``stderr``: files for the ranks' output, None: this
    process's; ``verbose``: from 2 on, say which rank runs where; ``nics``: network interfaces to use; ``executable``:
    the ranks' Python, of the driver's version, None: that of Spark's workers. ``prefix_output_with_timestamp``: print
        the time before every line. ``use_mpi``: only False; ``use_gloo`` and
    ``extra_mpi_args`` have no effect.

    Errors: RankError if the function raises an exception on a rank, or a rank or its executor ends; ValueError and
    TypeError for wrong arguments, too few slots, or a function that cannot be pickled; RuntimeError without a Spark
    session, or if Spark cannot start the tasks. The job is over when the call ends, also by KeyboardInterrupt.

    Example, with an active Spark session:

        def work(factor):
            import horoplug as hvd

            hvd.init()
            return hvd.rank() * factor

        horoplug.spark.run(work, args=(10,), num_proc=2)  # -> [0, 10]
    """
    context = active_context()
    _check_mpi(use_mpi, extra_mpi_args)
    size = context.defaultParallelism if num_proc is None else num_proc
    seconds = start_timeout_of(start_timeout)
    function = packed("run", fn, args, kwargs)
    if not is_dynamic(context):
        require_slots(context, size, seconds)
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
    description = f"horoplug.spark.run({name_of(fn)})"
    return BarrierJob(
        context, size, function, job_of_tasks(context, size), options, description=description
    ).run()


def job_of_tasks(
    context: Any, size: int, *, is_barrier: bool | None = None
) -> Callable[[Ticket], object]:
    """The action that runs ``size`` tasks without data. ``is_barrier``: None: unless Spark refuses that."""
    together = not is_dynamic(context) if is_barrier is None else is_barrier

    def action(ticket: Ticket) -> object:
        def task(_: Any) -> Any:
            serve(ticket)
            return iter(())

        tasks = context.parallelize(range(size), size)
        return (tasks.barrier() if together else tasks).mapPartitions(task).collect()

    return action


def packed(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """The function with its arguments, pickled. ``caller``: for messages. Errors: TypeError."""
    if not callable(fn):
        raise TypeError(f"horoplug.spark.{caller} wants a function, not {fn!r}")
    try:
        return pack(fn, tuple(args), dict(kwargs or {}))
    except Exception as error:
        raise TypeError(
            f"horoplug.spark.{caller}: {name_of(fn)} or its arguments cannot be pickled: "
            f"{why_not(fn, args, kwargs, error)}; make such objects inside of the function"
        ) from error


def name_of(fn: Any) -> str:
    """The name of a function, for messages."""
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def _check_mpi(use_mpi: bool | None, extra_mpi_args: str | None) -> None:
    if use_mpi:
        raise ValueError(
            "horoplug.spark.run: use_mpi: Spark starts the ranks, so that there is no mpirun; leave it out"
        )
    if extra_mpi_args:
        warnings.warn("horoplug.spark.run: extra_mpi_args has no effect without MPI", stacklevel=3)
