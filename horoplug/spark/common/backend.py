"""Where the ranks of an estimator run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.session import active_context


def default_num_proc() -> int:
    """Spark's default parallelism. Errors: RuntimeError without a session of Spark."""
    return int(active_context().defaultParallelism)


class Backend(ABC):
    """Runs a function on several ranks."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all ranks, and return the results by rank. ``env``: variables for them."""

    @abstractmethod
    def num_processes(self) -> int:
        """The number of ranks."""


class SparkBackend(Backend):
    """The ranks are tasks of a Spark job: :func:`horoplug.spark.run`.

    num_proc: number of ranks; None: Spark's default parallelism.
    env: environment variables of the ranks; options: further arguments of :func:`horoplug.spark.run`."""

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        self._num_proc = num_proc
        self._env = env
        self._options = options

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        import horoplug.spark

        variables = {**(self._env or {}), **(env or {})} or None
        results: list[Any] = horoplug.spark.run(
            fn,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            num_proc=self.num_processes(),
            env=variables,
            **self._options,
        )
        return results

    def num_processes(self) -> int:
        if self._num_proc is None:
            from pyspark.sql import SparkSession

            session = SparkSession.getActiveSession()
            if session is None:
                raise EstimatorError("there is no SparkSession: create one before fit()")
            self._num_proc = int(session.sparkContext.defaultParallelism)
        return self._num_proc
