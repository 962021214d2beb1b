"""The open descriptors of this process."""

import contextlib
import gc
import os


def descriptors() -> int:
    """How many there are."""
    return len(open_descriptors())


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each. First closes what belongs to garbage: Python collects it rarely in tests, and what
    earlier tests have left must not be closed while a test counts."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
