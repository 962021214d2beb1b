"""Two builds by turns: the order of their jobs, and what the ratios of neighbouring jobs say."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

FEWEST = 5
"""The number of ratios from which a change is told. Where nothing has changed and the noise is normally distributed,
the median of 5 ratios differs from 1 by more than their spread in 1 row of 6, of 7 in 1 of 17, of 15 in 1 of 260."""

Build = TypeVar("Build")


def order(pair: int, first: Build, second: Build) -> tuple[Build, Build]:
    """The order of the two jobs of a pair. It alternates, so that neither build always follows the other."""
    return (second, first) if pair % 2 else (first, second)


class Better(enum.Enum):
    LESS = "less"
    MORE = "more"


class Ratios(NamedTuple):
    """The ratios of the pairs of neighbouring jobs."""

    median: float
    spread: float
    """The interquartile range. A median that differs from 1 by less says nothing."""
    pairs: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratios:
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        return cls(float(median), float(high - low), len(ratios))

    def moved(self, better: Better, least: float = 0.0) -> str:
        """How the numerators of the ratios differ from their denominators: ``slower`` or ``faster``; empty if the
        median differs from 1 by no more than the spread or ``least``, or if there are too few ratios."""
        change = self.median - 1
        if self.pairs < FEWEST or abs(change) <= max(self.spread, least):
            return ""
        return "slower" if (change > 0) == (better is Better.LESS) else "faster"
