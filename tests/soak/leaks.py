"""What a process still has when it is in no job."""

import gc
import time
from collections.abc import Sequence

from tests.harness.support import resources


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
