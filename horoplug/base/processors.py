"""The processors that ranks may use.

A launcher may bind each rank to a core of its own (``--bind-to core``), and OpenMP the main thread. Such a mask says
nothing about the other threads of the rank, nor about whether the ranks of a host outnumber its processors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator


def own_processors() -> frozenset[int]:
    """The processors on which any thread of this process may run."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has just ended
            found |= os.sched_getaffinity(int(thread))
    return frozenset(found)


def engine_processors(hosts: Collection[int], ranks: int) -> frozenset[int]:
    """The processors for the threads of an engine.

    ``hosts``: those that the ranks of this host may use together; ``ranks``: how many these are. If this process has
    one processor, or seems to share fewer than one for each rank, its own binding is not the whole truth."""
    own = own_processors()
    return own if len(own) >= max(ranks, 2) else own | frozenset(hosts)


@contextlib.contextmanager
def starting_threads_on(processors: Collection[int]) -> Iterator[None]:
    """Threads that this one starts within the block may run on these processors. This thread keeps its own."""
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a cpuset forbids it: they keep this thread's
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
