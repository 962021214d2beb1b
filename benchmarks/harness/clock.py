"""Times compared functions in alternating blocks of one run, on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horoplug.bench.cases import Run

BLOCKS = 5  # blocks of iterations; the compared functions alternate between blocks


def alternate(
    hvd: Any, runs: Sequence[Run], iterations: int, blocks: int = BLOCKS
) -> list[np.ndarray]:
    """Seconds of each iteration of each run, on its slowest rank; at least ``iterations`` of each.

    Each function runs a block of iterations after a warm-up, then the next function has its turn. So the varying load
    of the machine affects all functions alike."""
    clock = time.perf_counter
    seconds: list[list[float]] = [[] for _ in runs]
    warm_up = max(1 if iterations <= blocks else 2, iterations // 20)
    for _ in range(blocks):
        for run, times in zip(runs, seconds, strict=True):
            hvd.barrier()
            for _ in range(warm_up):
                run()
            hvd.barrier()
            for _ in range(-(-iterations // blocks)):
                start = clock()
                run()
                times.append(clock() - start)
    return [hvd.allreduce(np.array(times), op=hvd.Max, name="clock.times") for times in seconds]


class Summary(NamedTuple):
    median: float
    p99: float
    spread: float
    """The interquartile range over the median."""

    @classmethod
    def of(cls, seconds: np.ndarray) -> Summary:
        low, median, high, p99 = np.quantile(seconds, [0.25, 0.5, 0.75, 0.99])
        return cls(float(median), float(p99), float((high - low) / median))


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
