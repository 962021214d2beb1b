"""What a process still has when it is in no job."""

import gc
import time
from collections.abc import Collection, Sequence

from tests.harness.support import resources

# TensorFlow and JAX start threads of their pools late, at most so many; a leak has more after some jobs.
_LATE_THREADS = 8
_STARTS_LATE = {"tensorflow", "jax"}


def allowed(before: Sequence[int] | None, used: Collection[str]) -> tuple[int, ...] | None:
    """What a process may have that had ``before`` and has used these frameworks; None: anything."""
    if before is None or _STARTS_LATE.isdisjoint(used):
        return before and tuple(before)
    descriptors, threads, segments = before
    return descriptors, threads + _LATE_THREADS, segments


def excess(before: Sequence[int] | None) -> tuple[tuple[int, ...], bool]:
    """This process's descriptors, threads and segments, and whether there are more than before.

    What has just ended may be counted for a moment."""
    deadline = time.monotonic() + 10
    gc.collect()
    while True:
        found = resources()[:3]
        more = any(a > b for a, b in zip(found, before or found, strict=True))
        if not more or time.monotonic() > deadline:
            return found, more
        time.sleep(0.01)
