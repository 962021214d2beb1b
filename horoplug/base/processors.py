"""The processors that ranks may use.

A launcher may bind each rank to one core (``--bind-to core``), and OpenMP may bind the main thread. The affinity mask
of the main thread therefore does not tell where the other threads of the rank may run, nor whether a host has fewer
processors than ranks."""

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

    ``hosts``: the processors that the ranks of this host may use together; ``ranks``: number of ranks on this host. The
    result is the affinity of this process, extended by ``hosts`` if it has only one processor or fewer processors than
    there are ranks: a launcher has then probably bound each rank separately."""
    own = own_processors()
    return own if len(own) >= max(ranks, 2) else own | frozenset(hosts)


@contextlib.contextmanager
def starting_threads_on(processors: Collection[int]) -> Iterator[None]:
    """Context in which the calling thread starts threads with this affinity. Its own affinity is restored at the
    end."""
    before = os.sched_getaffinity(0)
    # If a cpuset forbids it, new threads inherit this thread's affinity.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
