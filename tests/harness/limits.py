"""The time limits of tests. They are there only to end hangs, and grow with the load and the slowness of the machine,
so that no test depends on its speed."""

import os
import time

import pytest

# Processor time of the sample of work on a machine of the speed for which the limits were chosen.
_REFERENCE = 0.0015
_SAMPLE = range(20_000)
# Runnable threads for each processor that `make test` itself has at most.
_OWN_LOAD = 4.0
_FRESH_SECONDS = 15.0
DEFAULT = 180.0
"""Seconds for a test that has no mark ``timeout``."""

_measured: tuple[float, float] = float("-inf"), 1.0


def slowness() -> float:
    """How much longer than usual a test may take on this machine now; at least 1."""
    global _measured
    now = time.monotonic()
    if now - _measured[0] > _FRESH_SECONDS:
        begin = time.thread_time()
        sum(number * number % 7 for number in _SAMPLE)
        work = (time.thread_time() - begin) / _REFERENCE
        load = os.getloadavg()[0] / (_OWN_LOAD * (os.cpu_count() or 1))
        _measured = now, max(work, 1.0) * max(load, 1.0)
    return _measured[1]


def scaled(limit: float) -> float:
    """A limit, in seconds, for the machine as it is now."""
    return limit * slowness()


def extend(item: pytest.Item) -> None:
    """Apply the limit of a test, which pytest-timeout enforces, to the machine as it is now."""
    mark = item.get_closest_marker("timeout")
    limit = DEFAULT if mark is None else float(mark.args[0])
    item.add_marker(pytest.mark.timeout(scaled(limit)), append=False)
