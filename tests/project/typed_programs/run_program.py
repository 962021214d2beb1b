# pyright: strict
"""``horoplug.run`` and the exception that it raises."""

from typing import Any

from typing_extensions import assert_type

import horoplug


def train(rate: float, *, epochs: int) -> float:
    return rate * epochs


def main() -> None:
    results = horoplug.run(train, args=(0.1,), kwargs={"epochs": 2}, num_proc=2, hosts="a:1,b:1")
    assert_type(results, list[float])
    try:
        horoplug.run(print, num_proc=1, env={"A": "b"}, verbose=True)
    except horoplug.RankError as error:
        assert_type(error.rank, int | None)
        assert_type(error.traceback, str)
    anything: Any = train
    assert_type(horoplug.run(anything), list[Any])
