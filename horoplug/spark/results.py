"""The results of a job's ranks, or the error of the rank that has failed first."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any

from horoplug.runner.exchange import Exchange, ResultFiles
from horoplug.runner.run import RankError
from horoplug.runner.run_task import Failure


class Results:
    """What ranks have sent to the exchange."""

    def __init__(self, exchange: Exchange, files: ResultFiles) -> None:
        self._exchange = exchange
        self._files = files

    def by_rank(self, processes: Sequence[int]) -> list[Any]:
        """The results of the processes that are listed by rank. Errors: RankError if one has none."""
        found = []
        for rank, number in enumerate(processes):
            if number in self._exchange.problems:
                text = (
                    f"rank {rank}: its result cannot be stored: {self._exchange.problems[number]}"
                )
                raise RankError(text, rank)
            if number not in self._exchange.returned:
                raise RankError(f"rank {rank} ended before its function returned", rank)
            try:
                found.append(self._load(number))
            except Exception as error:
                text = f"rank {rank}: its result cannot be unpickled: {error}"
                raise RankError(text, rank) from error
        return found

    def failure(
        self, text: str, blamed: int | None, processes: Sequence[int], why: str = ""
    ) -> RankError:
        """The error of a job that has failed. ``text``: how the process ``blamed`` has ended; an exception that a
        process has reported explains more. ``processes``: by rank; ``why``: why the job has ended with it."""
        counted = {*processes, blamed}
        raised = [number for number in self._exchange.raised if number in counted]
        # A rank reports its exception before other ranks can fail because of it. A rank without a report has crashed.
        if not raised or not (
            blamed is None or blamed in raised or blamed in self._exchange.returned
        ):
            return RankError(text, _rank(blamed, processes))
        number = raised[0]
        rank = _rank(number, processes)
        try:
            failure = Failure(*self._load(number))
        except Exception:
            return RankError(text, rank)
        ending = f"\nThe job has ended: {why}" if why else ""
        name = f"process {number}" if rank is None else f"rank {rank}"
        error = RankError(f"{name}: {failure.text}{ending}\n\n{failure.trace}", rank, failure.trace)
        if failure.pickled is not None:
            with contextlib.suppress(Exception):
                error.__cause__ = pickle.loads(failure.pickled)
        return error

    def _load(self, number: int) -> Any:
        with open(self._files[number], "rb", closefd=False) as file:
            file.seek(0)
            return pickle.load(file)


def _rank(number: int | None, processes: Sequence[int]) -> int | None:
    return processes.index(number) if number is not None and number in processes else None
