"""What a process still has when it is in no job."""

import contextlib
import gc
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.support import resources

# The thread pools of TensorFlow and XLA have names that begin with this. They start threads late: tf_Compute, for
# example, a third one in the second job of a process.
_POOLS_OF_FRAMEWORKS = "tf_"


def excess(before: Sequence[int] | None) -> tuple[tuple[int, ...], bool]:
    """This process's descriptors, threads and segments, and whether there are more than before. The threads are those
    outside of the frameworks' pools.

    What has just ended may be counted for a moment."""
    deadline = time.monotonic() + 10
    gc.collect()
    while True:
        descriptors, _, segments, _ = resources()
        found = descriptors, _threads(), segments
        more = any(a > b for a, b in zip(found, before or found, strict=True))
        if not more or time.monotonic() > deadline:
            return found, more
        time.sleep(0.01)


def _threads() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            count += not (task / "comm").read_text().startswith(_POOLS_OF_FRAMEWORKS)
    return count
