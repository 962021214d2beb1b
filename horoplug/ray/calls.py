"""Calls of a function on workers: what is sent, the values that the function reports, and the results or the error."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoplug.base.pickling import why_not
from horoplug.runner.ending.results import RankError
from horoplug.runner.functions.run_task import Outcome, pack

Callbacks = Sequence[Callable[[dict[str, Any]], object]] | None
_CAUSE_SECONDS = 2.0  # for a failure that explains the errors of other ranks to be reported
_POLL_SECONDS = 0.1  # between two looks for reported values
# Ray's text for an actor that has died ends with general advice.
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)", re.MULTILINE)
_IDENTITY = re.compile(r"The actor died|\w+: ")


def pack_function(
    function: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> bytes:
    """Pickle a function for the workers, which call it with the executable before ``args``. Errors: TypeError with one
    line if that is impossible."""
    if not callable(function):
        raise TypeError(f"horoplug.ray wants a function, not {function!r}")
    try:
        return pack(function, tuple(args or ()), dict(kwargs or {}))
    except Exception as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise TypeError(
            f"the function {name}, or an argument, cannot be pickled and sent to the workers: "
            f"{why_not(function, args, kwargs, error)}; make such objects inside of the function"
        ) from error


def without_executable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that takes the executable as a first argument, and ignores it."""
    if not callable(function):
        raise TypeError(f"horoplug.ray wants a function, not {function!r}")

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__qualname__ = getattr(function, "__qualname__", call.__qualname__)  # for error messages
    return call


class Reports:
    """The values that ranks pass to :func:`horoplug.ray.ray_logger.log`. A context manager."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = list(callbacks or ())
        self.queue: Any = None
        """A queue of Ray; None: there are no callbacks."""

    def __enter__(self) -> Reports:
        if self._callbacks:
            from ray.util.queue import Queue

            # The actor is placed on this node, because the job goes on when another node is lost.
            here = ray.get_runtime_context().get_node_id()
            strategy = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
            self.queue = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": strategy})
        return self

    def __exit__(self, *_: object) -> None:
        queue, self.queue = self.queue, None
        if queue is not None:
            with contextlib.suppress(RayError):
                queue.shutdown(force=True)

    @property
    def poll_seconds(self) -> float | None:
        """How often :meth:`deliver` has to be called; None: never."""
        return _POLL_SECONDS if self._callbacks else None

    def deliver(self) -> None:
        """Call the callbacks with what has arrived."""
        if self.queue is None:
            return
        for value in self.queue.get_nowait_batch(self.queue.qsize()):
            for callback in self._callbacks:
                callback(value)


def gather(references: Mapping[Any, int], reports: Reports) -> list[Any]:
    """The results of ``attempt`` of workers, by rank. ``references``: the rank for each call.

    Errors: RankError as soon as a rank has failed. If it says that another one has failed, that one is waited for."""
    results: dict[int, Any] = {}
    failed: RankError | None = None
    deadline = None
    pending = dict(references)
    while pending and (deadline is None or time.monotonic() < deadline):
        seconds = reports.poll_seconds if deadline is None else _POLL_SECONDS
        done, _ = ray.wait(list(pending), num_returns=1, timeout=seconds)
        reports.deliver()
        for reference in done:
            rank = pending.pop(reference)
            outcome, error = _outcome(reference, rank)
            if error is None:
                results[rank] = outcome.value
            elif not outcome.is_consequence:
                raise error
            else:
                failed = failed or error
                deadline = deadline or time.monotonic() + _CAUSE_SECONDS
    if failed is not None:
        raise failed
    return [results[rank] for rank in sorted(results)]


def _outcome(reference: Any, rank: int) -> tuple[Outcome, RankError | None]:
    try:
        outcome: Outcome = ray.get(reference)
    except RayActorError as error:
        return Outcome(None), RankError(f"rank {rank}: its actor has died: {death(error)}", rank)
    except RayTaskError as error:
        reason = str(error.cause or error).strip().splitlines()[0]
        return Outcome(None), RankError(
            f"rank {rank}: its result cannot be returned: {reason}", rank
        )
    if outcome.failure is None:
        return outcome, None
    return outcome, outcome.failure.error(f"rank {rank}: {outcome.failure.text}", rank)


def death(error: RayActorError) -> str:
    """Why an actor has ended, in one line."""
    detail = _DETAIL.search(str(error))
    if detail is not None:
        return detail[1].strip()
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = (line for line in lines if line and not _IDENTITY.match(line))
    return next(reasons, "no reason is known")
