"""One job of a fixed number of ranks: the tasks of a barrier job of Spark, which start together or not at all.

The job has one attempt: where a rank is lost, the others cannot go on. Spark would run the whole stage again if a task
failed or was lost, so that its job is cancelled before."""

from __future__ import annotations

import dataclasses
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horoplug.base.config import value
from horoplug.base.variables import argument, seconds
from horoplug.runner.ending.blame import Blame, describe
from horoplug.runner.ending.results import RankError
from horoplug.runner.worker_job import WorkerJob

from .output import Output
from .service import Ended, Event, Joined, Lost, Printed, SparkEnded, Task, TaskService
from .session import driver_address, listed, named_variables, not_run, reason, settings
from .tasks import Ticket

_END_SECONDS = 6.0  # limit for the other ranks to end after a failure; see tasks.py
_EXIT_SECONDS = 30.0  # limit for Spark's job to end once its tasks may
_NO_ROWS = "horoplug.spark.run_on_dataframe: the data has no rows"


@dataclasses.dataclass
class Options:
    """What a caller may say of a job."""

    start_timeout: float
    env: Mapping[str, str] | None = None
    stdout: Any = None
    stderr: Any = None
    verbose: int = 1
    nics: Sequence[str] | str | None = None
    timestamps: bool = False
    executable: str | None = None

    def output(self, size: int) -> Output:
        """The output of a job that begins with ``size`` ranks."""
        streams = (self.stdout, self.stderr)
        return Output(size, *streams, timestamps=self.timestamps, verbose=self.verbose)


class BarrierJob:
    """Runs one job. ``action`` starts tasks of Spark that call :func:`.tasks.serve`."""

    def __init__(
        self,
        context: Any,
        size: int,
        function: bytes,
        action: Callable[[Ticket], object],
        options: Options,
        *,
        description: str,
        needs_rows: bool = False,
    ) -> None:
        """``function``: from :func:`horoplug.runner.functions.run_task.pack`; ``description``: for Spark's pages;
        ``needs_rows``: it is an error if no task has data."""
        self._context = context
        self._size = size
        self._function = function
        self._action = action
        self._options = options
        self._description = description
        self._needs_rows = needs_rows
        self._joined: dict[int, Task] = {}  # by partition
        self._tasks: list[Task] = []  # by rank, once all have joined
        self._blame = Blame(range(size))
        self._texts: dict[int, str] = {}  # how ranks have ended
        self._spark: SparkEnded | None = None

    def run(self) -> list[Any]:
        """Returns the results by rank. Errors: RankError; RuntimeError and ValueError if the ranks could not start."""
        output = self._output = self._options.output(self._size)
        address = driver_address(self._context, self._options.nics)
        with TaskService(self._context, address, self._function, self._size, self._size) as service:
            try:
                service.submit(self._action, self._description)
                self._wait_for_tasks(service)
                with self._form(service) as job:
                    self._start(job, service)
                    self._wait_for_ranks(job, service)
                    results = service.exchange.results(range(self._size))
                    first = self._blame.first
                    why = (
                        "" if first is None else f"{self._texts[first]}; the other ranks were ended"
                    )
                    found = results.by_rank(int(first is not None), why, first)
                    self._release(service)
                    return found
            finally:
                output.close()

    # ---- the start ---------------------------------------------------------------------------------------------------

    def _wait_for_tasks(self, service: TaskService) -> None:
        deadline = time.monotonic() + self._options.start_timeout
        while len(self._joined) < self._size:
            event = next_event(service, deadline)
            if event is None:
                raise RuntimeError(
                    f"horoplug.spark: only {len(self._joined)} of {self._size} tasks have started in "
                    f"{self._options.start_timeout:g} s: are other jobs using the slots? (start_timeout is the limit)"
                )
            match event:
                case Joined(task):
                    self._join(task)
                case Lost(task) if task.tasks:
                    raise RuntimeError(
                        f"horoplug.spark: the Spark task or its executor on {task.host} has ended before all tasks had "
                        "started"
                    )
                case Lost(task) if self._joined.get(task.partition) is task:
                    del self._joined[task.partition]  # Spark runs it again
                case SparkEnded(None) if self._needs_rows:
                    raise ValueError(_NO_ROWS)
                case SparkEnded(error):
                    raise not_run(error) from error
        if self._needs_rows and not any(task.has_rows for task in self._joined.values()):
            raise ValueError(_NO_ROWS)

    def _join(self, task: Task) -> None:
        if task.problem:
            raise RankError(f"partition {task.partition}: {task.problem}")
        if task.tasks not in (0, self._size):
            raise ValueError(
                f"horoplug.spark.run_on_dataframe: the data has {task.tasks} partitions in Spark's job, and not "
                f"num_proc={self._size}: it is empty, or Spark has merged partitions; leave out repartition=False"
            )
        self._joined[task.partition] = task

    def _form(self, service: TaskService) -> WorkerJob:
        by_partition = [self._joined[partition] for partition in sorted(self._joined)]
        nics = self._options.nics
        job = WorkerJob(
            [task.host for task in by_partition],
            service.address,
            settings=settings(),
            interface=listed(nics),
            secret=service.secret,
        )
        self._tasks = [by_partition[worker] for worker in job.by_rank]
        return job

    def _start(self, job: WorkerJob, service: TaskService) -> None:
        options = self._options
        given = named_variables() | dict(options.env or {})
        for rank, task in enumerate(self._tasks):
            variables = given | job.environment(job.by_rank[rank]) | service.variables
            task.start(rank, variables, options.executable)
            self._output.say(f"rank {rank} is partition {task.partition} on {task.host}")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _wait_for_ranks(self, job: WorkerJob, service: TaskService) -> None:
        """Returns when all ranks have ended, those after a failure because they were told to."""
        while self._blame.running and (
            self._blame.due is None or time.monotonic() < self._blame.due
        ):
            event = next_event(service, self._blame.due)
            if event is not None:
                self._handle(event, job)
        if self._blame.first is None:
            return
        for task in self._tasks:
            task.kill()
        deadline = time.monotonic() + _END_SECONDS
        while self._blame.running and (event := next_event(service, deadline)) is not None:
            self._handle(event, job)
        service.cancel()

    def _handle(self, event: Event, job: WorkerJob) -> None:
        match event:
            case Printed(number, stream, data):
                self._output.feed(number, stream, data)
            case Ended(_, rank, code, problem):
                self._rank_ended(rank, code or bool(problem), problem or describe(code), job)
                if problem:
                    self._texts[rank] = f"rank {rank}: {problem}"
            case Lost(task) if task in self._tasks and task.number is not None:
                text = f"was lost: the Spark task or its executor on {task.host} has ended"
                self._rank_ended(task.number, -signal.SIGKILL, text, job)
            case SparkEnded(error):
                self._spark = event
                text = f"was lost: {'the Spark job has ended' if error is None else reason(error)}"
                for rank in sorted(self._blame.running):
                    self._rank_ended(rank, -signal.SIGKILL, text, job)

    def _rank_ended(self, rank: int, code: int, text: str, job: WorkerJob) -> None:
        if rank not in self._blame.running:
            return
        self._texts[rank] = f"rank {rank} {text}"
        if code:
            job.lost(job.by_rank[rank], text)
        self._blame.ended(rank, code, job.departures(), time.monotonic(), present=job.present())

    def _release(self, service: TaskService) -> None:
        for task in self._tasks:
            task.release()
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._spark is None and (event := next_event(service, deadline)) is not None:
            if isinstance(event, SparkEnded):
                self._spark = event
        if self._spark is None:
            service.cancel()


def next_event(service: TaskService, deadline: float | None) -> Event | None:
    """The next event, None at the deadline (``time.monotonic()``)."""
    try:
        left = None if deadline is None else max(deadline - time.monotonic(), 0)
        return service.events.get(timeout=left)
    except queue.Empty:
        return None


def start_timeout_of(given: float | None) -> float:
    """The limit for the start: the argument, HOROVOD_SPARK_START_TIMEOUT, or 600 s. Errors: ValueError."""
    limit = (
        value("SPARK_START_TIMEOUT") if given is None else argument("start_timeout", given, seconds)
    )
    return float(limit)
