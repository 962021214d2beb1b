"""``horoplug.spark.run_elastic``: every task of Spark is a slot for a process, and processes are replaced.

Spark runs a lost task again on another executor, and the new attempt joins as a new slot. The tasks are no barrier
job, which would end as a whole with the first of them."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from horoplug.runner.elastic.roster import Start, make_limits
from horoplug.runner.elastic_worker_job import ElasticWorkerJob
from horoplug.runner.ending.blame import describe
from horoplug.runner.ending.finish import Finish
from horoplug.runner.ending.results import RankError
from horoplug.runner.terms import Terms

from .barrier import Options, next_event, start_timeout_of
from .output import Output
from .run import job_of_tasks, name_of, packed
from .service import Ended, Event, Joined, Lost, Printed, SparkEnded, Task, TaskService
from .session import (
    active_context,
    check_slots,
    driver_address,
    is_dynamic,
    listed,
    named_variables,
    not_run,
    reason,
    settings,
    wait_for_slots,
)

__all__ = ["run_elastic"]

_NUMBERS: Final = 1 << 32  # the exchange's numbers of processes are less
_END_SECONDS = 6.0  # limit for processes to end after a failure; see tasks.py
_EXIT_SECONDS = 30.0  # limit for Spark's job to end once its tasks may
_TICK_SECONDS = 0.5


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)``, which uses ``hvd.elastic.run``, on ranks that come and go with Spark's executors.
    Returns the results of the last membership, by rank.

    The job begins with ``num_proc`` processes (None: ``spark.default.parallelism``), or with those that Spark can
    start, and goes on with ``min_num_proc`` to ``max_num_proc`` (None: ``num_proc``). A process that fails, or whose
    executor is lost, is replaced; Spark gives up a task that has lost ``spark.task.maxFailures`` executors.
    ``elastic_timeout``: seconds that the job waits for ``min_num_proc`` processes after a failure, None:
    HOROVOD_ELASTIC_TIMEOUT; ``reset_limit``: how often the job may be formed again. ``min_np`` and ``max_np`` are
    former names.

    The other arguments are those of :func:`horoplug.spark.run.run`; ``start_timeout`` is in seconds. Raises its
    exceptions, RankError only once the job has failed.

    Example, with an active Spark session:

        def work(epochs):
            import horoplug.torch as hvd

            @hvd.elastic.run
            def train(state):
                while state.epoch < epochs:
                    state.epoch += 1
                    state.commit()
                return state.epoch

            hvd.init()
            return train(hvd.elastic.TorchState(epoch=0))

        horoplug.spark.run_elastic(work, args=(3,), num_proc=2)  # -> [3, 3]
    """
    context = active_context()
    size = context.defaultParallelism if num_proc is None else num_proc
    least = _first(min_num_proc, min_np, size)
    most = _first(max_num_proc, max_np, max(size, least))
    seconds = start_timeout_of(start_timeout)
    limits = make_limits(least, most, wait=elastic_timeout, resets=reset_limit, hosts_may_come=True)
    function = packed("run_elastic", fn, args, kwargs)
    wanted = min(max(size, least), most)
    if not is_dynamic(context):
        have = wait_for_slots(context, wanted, seconds)
        check_slots("min_num_proc", least, have)
        wanted = wanted if have is None else min(wanted, have)
    options = Options(
        start_timeout=seconds,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        timestamps=prefix_output_with_timestamp,
    )
    output = options.output(0)
    address = driver_address(context, nics)
    with TaskService(context, address, function, most, _NUMBERS) as service:
        slots_of_spark = _Slots(service, output, options)
        try:
            action = job_of_tasks(context, most, is_barrier=False)
            service.submit(action, f"horoplug.spark.run_elastic({name_of(fn)})")
            slots_of_spark.wait_for(wanted, least, seconds)
            with ElasticWorkerJob(
                *(slots_of_spark, limits, slots_of_spark.counts(), service.address),
                settings=settings(),
                interface=listed(nics),
                secret=service.secret,
            ) as job:
                return slots_of_spark.drive(job)
        finally:
            output.close()


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


class _Slots:
    """Implements :class:`horoplug.runner.elastic.driver.Workers` on tasks. Events are handled in a thread of their own
    while :meth:`drive` runs the job in the caller's."""

    def __init__(self, service: TaskService, output: Output, options: Options) -> None:
        self._service = service
        self._output = output
        self._options = options
        self._given = named_variables() | dict(options.env or {})
        self._lock = threading.Lock()
        self._tasks: list[Task] = []
        self._busy: dict[int, Task] = {}  # by process
        self._job: ElasticWorkerJob | None = None
        self._spark_ended = threading.Event()
        self._is_finished = False  # no further processes are wanted
        self._is_over = False

    def counts(self) -> dict[str, int]:
        """The number of slots of each host."""
        with self._lock:
            return dict(Counter(task.host for task in self._tasks))

    def wait_for(self, wanted: int, least: int, seconds: float) -> None:
        """Wait until ``wanted`` tasks have joined. Errors: RuntimeError if fewer than ``least`` have in ``seconds``."""
        deadline = time.monotonic() + seconds
        while len(self._tasks) < wanted:
            event = next_event(self._service, deadline)
            if event is None:
                break
            if isinstance(event, SparkEnded):
                raise not_run(event.error) from event.error
            self._handle(event)
        if len(self._tasks) < least:
            raise RuntimeError(
                f"horoplug.spark: only {len(self._tasks)} of min_num_proc={least} tasks have started in {seconds:g} s: "
                "are other jobs using the slots? (start_timeout is the limit)"
            )

    def drive(self, job: ElasticWorkerJob) -> list[Any]:
        """Run the job to its end. Returns the results by rank. Errors: RankError."""
        self._job = job
        thread = threading.Thread(target=self._handle_all, daemon=True)
        thread.start()
        service = self._service
        try:
            outcome = job.run()
            if outcome.code == 0:
                self._spark_ended.wait(_EXIT_SECONDS)
            else:
                self._wait_for_ends()
        finally:
            self._is_over = True
            if not self._spark_ended.is_set():
                service.cancel()
            thread.join(_END_SECONDS)  # it may be telling a task that does not listen
        members = job.members
        if not outcome.code:  # otherwise, fn may not have called init()
            members = members or tuple(sorted(service.exchange.returned))
        text = outcome.text(Terms())
        return service.exchange.results(members).by_rank(outcome.code, text, outcome.process, text)

    def _wait_for_ends(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while self._busy and time.monotonic() < deadline and not self._spark_ended.wait(0.02):
            pass

    # ---- events ------------------------------------------------------------------------------------------------------

    def _handle_all(self) -> None:
        while not self._is_over:
            event = next_event(self._service, time.monotonic() + _TICK_SECONDS)
            if event is None:
                continue
            try:
                self._handle(event)
            except Exception as error:  # such as an error of the user's stdout
                assert self._job is not None
                self._job.abandon(RankError(f"horoplug.spark: {reason(error)}"))

    def _handle(self, event: Event) -> None:
        match event:
            case Joined(task):
                self._joined(task)
            case Printed(process, stream, data):
                self._output.feed(process, stream, data)
            case Ended(task, process, code, problem):
                self._ended(process, code, problem or describe(code))
            case Lost(task):
                self._lost(task)
            case SparkEnded(error):
                self._spark_ended.set()
                if self._job is not None:
                    self._job.abandon(RankError(f"the Spark job has ended: {reason(error)}"))

    def _joined(self, task: Task) -> None:
        with self._lock:
            self._tasks.append(task)
        if self._is_finished:
            task.release()
        elif self._job is not None:
            self._job.hosts_found(self.counts())

    def _ended(
        self, process: int, code: int, text: str, slots: Mapping[str, int] | None = None
    ) -> None:
        with self._lock:
            self._busy.pop(process, None)
        if self._job is not None:
            self._job.ended(process, code, text, slots)

    def _lost(self, task: Task) -> None:
        with self._lock:
            with contextlib.suppress(ValueError):
                self._tasks.remove(task)
            process = next((number for number, other in self._busy.items() if other is task), None)
        if process is not None:
            text = "was lost: its Spark task or executor has ended"
            self._ended(process, -signal.SIGKILL, text, self.counts())
        elif self._job is not None and not self._is_finished:
            self._job.hosts_found(self.counts())

    # ---- Workers: called in the thread of drive() --------------------------------------------------------------------

    def start(self, start: Start) -> None:
        job = self._job
        assert job is not None
        variables = self._given | job.environment(start) | self._service.variables
        with self._lock:
            idle = (
                task
                for task in self._tasks
                if task.host == start.host and task not in self._busy.values()
            )
            task = next(idle, None)
            if task is not None:
                self._busy[start.process] = task
        if task is None:
            job.ended(start.process, -signal.SIGKILL, "was not started: its Spark task has ended")
            return
        self._output.say(f"process {start.process} is partition {task.partition} on {task.host}")
        task.start(start.process, variables, self._options.executable)

    def kill(self, process: int) -> None:
        with self._lock:
            task = self._busy.get(process)
        if task is not None:
            task.kill()

    def hosts_changed(self) -> None:
        pass

    def finish(self) -> None:
        self._is_finished = True
        with self._lock:
            tasks = list(self._tasks)
        for task in tasks:
            task.release()

    def fail(self, finish: Finish) -> None:
        self._is_finished = True
        with self._lock:
            tasks = list(self._busy.values())
        for task in tasks:
            task.kill()

    def say(self, text: str) -> None:
        self._output.say(text)
