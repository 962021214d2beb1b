"""The results of a job by rank, or the error of the process that has failed first: of ``run``, Spark and Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple


class RankError(RuntimeError):
    """The function of :func:`horoplug.run` did not return on every rank.

    ``rank``: the rank that failed first, None if no rank failed; ``traceback``: the text of its exception's traceback,
    empty without an exception. If the exception could be pickled, it is the ``__cause__``.

    Example:

        def fail():
            raise ValueError("no data")

        try:
            horoplug.run(fail, num_proc=2)
        except horoplug.RankError as error:
            found = error.rank in (0, 1), str(error.__cause__)
        found  # -> (True, "no data")
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.rank, self.traceback)


class Failure(NamedTuple):
    """An exception of a process: its text without and with traceback, and the pickled exception if that is possible."""

    text: str
    trace: str
    pickled: bytes | None

    def error(self, text: str, rank: int | None) -> RankError:
        """The error that reports this exception after a text, with the exception as its cause."""
        error = RankError(f"{text}\n\n{self.trace}", rank, self.trace)
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # whatever unpickling raises
                error.__cause__ = pickle.loads(self.pickled)
        return error


def failed_first(
    blamed: int | None, raised: Sequence[int], returned: Collection[int]
) -> int | None:
    """The process that has failed first; None: none has. ``blamed``: the one whose end is the cause, as far as can be
    seen from outside; ``raised``: those that have reported an exception, in that order; ``returned``: those whose
    function has returned.

    A process reports its exception before others can fail because of it. A process without a report has crashed."""
    if raised and (blamed is None or blamed in raised or blamed in returned):
        return raised[0]
    return blamed


@dataclasses.dataclass(frozen=True)
class Results:
    """What the processes of a job have sent.

    ``processes``: their numbers, by rank; ``returned``, ``raised``: see :func:`failed_first`; ``problems``: why the
    result of a process could not be stored; ``load``: unpickles what a process has sent: its result, or the fields of
    its :class:`Failure`."""

    processes: Sequence[int]
    returned: Collection[int]
    raised: Sequence[int]
    problems: Mapping[int, str]
    load: Callable[[int], Any]

    def of(self, blamed: int | None) -> Results:
        """The part of the last membership, and of the process that is blamed. Others were replaced."""
        counted = {*self.processes, blamed}
        return Results(
            self.processes,
            {number for number in self.returned if number in counted},
            [number for number in self.raised if number in counted],
            {number: text for number, text in [*self.problems.items()] if number in counted},
            self.load,
        )

    def by_rank(
        self, code: int, text: str = "", blamed: int | None = None, why: str = ""
    ) -> list[Any]:
        """The results by rank. ``code``: of the job's end, 0 if it has not failed; ``text``: how it has failed, or the
        process ``blamed`` has; an exception that a process has reported explains more. ``why``: why the job has ended
        with that exception. Errors: RankError."""
        found = self.of(blamed if code else None)
        for number, problem in found.problems.items():
            raise found._error(number, f"its result cannot be stored: {problem}")
        first = failed_first(blamed if code else None, found.raised, found.returned)
        if first is not None and first in found.raised:
            raise found._raised(first, text, why)
        if code:
            raise RankError(text, found._rank(blamed))
        if not found.processes:
            raise RankError("all processes ended before their function returned")
        for rank, number in enumerate(found.processes):
            if number not in found.returned:
                raise RankError(f"rank {rank} ended before its function returned", rank)
        return [found._result(number) for number in found.processes]

    def _result(self, number: int) -> Any:
        try:
            return self.load(number)
        except Exception as error:
            raise self._error(number, f"its result cannot be unpickled: {error}") from error

    def _raised(self, number: int, text: str, why: str) -> RankError:
        try:
            failure = Failure(*self.load(number))
        except Exception:
            return RankError(text, self._rank(number))
        ending = f"\nThe job has ended: {why}" if why else ""
        return failure.error(f"{self._name(number)}: {failure.text}{ending}", self._rank(number))

    def _error(self, number: int, text: str) -> RankError:
        return RankError(f"{self._name(number)}: {text}", self._rank(number))

    def _name(self, number: int) -> str:
        rank = self._rank(number)
        return f"process {number}" if rank is None else f"rank {rank}"

    def _rank(self, number: int | None) -> int | None:
        return self.processes.index(number) if number in self.processes else None
