"""The share of a host's processors that each of its ranks gets: the number of compute threads of its frameworks.

A framework starts as many compute threads as there are processors. With several ranks on a host, these threads take the
processors from each other. Whoever starts ranks therefore sets the variables by which frameworks choose their number of
threads (:func:`give`), unless the user has set them. The module is a part of the agent's source, and uses only the
standard library and other such modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Final, NamedTuple

from horoplug.base import cgroup
from horoplug.base.processors import own_processors

RANKS: Final = "_HOROPLUG_RANKS_OF_HOST"
"""Variable with the number of ranks on the host, which :func:`give` replaces by those of the frameworks."""
GIVEN: Final = "_HOROPLUG_THREAD_SHARE"
"""Variable with the number of threads that :func:`give` has set, and the names of the variables."""


class Variable(NamedTuple):
    """A variable by which frameworks choose their number of threads."""

    name: str
    readers: tuple[str, ...]
    """The modules that read it."""
    others: tuple[str, ...] = ()
    """Other variables for the same purpose, by which the user may have decided."""


VARIABLES: Final = (
    # oneDNN and the BLAS of PyTorch and NumPy read it, too. MKL_NUM_THREADS and OPENBLAS_NUM_THREADS take precedence
    # over it, so they are not set: a program may still set this one itself before it imports the framework.
    Variable("OMP_NUM_THREADS", ("torch", "numpy")),
    Variable("TF_NUM_INTRAOP_THREADS", ("tensorflow",)),
    Variable("TF_NUM_INTEROP_THREADS", ("tensorflow",)),
    Variable("NPROC", ("jax",), ("PJRT_NPROC",)),  # the thread pools of XLA's CPU client
)

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class Capacity(NamedTuple):
    """What the ranks of a host may use together."""

    cores: int
    quota: float = 0.0
    """CPU time per second; 0: no limit."""


class Share(NamedTuple):
    """The threads of each rank, and the variables that were set."""

    threads: int
    names: tuple[str, ...]


def share(capacity: Capacity, ranks: int) -> int:
    """The number of compute threads of each of the host's ranks."""
    cores, quota = capacity
    return max(int(min(cores, quota or cores) / ranks), 1)


def shared(env: Mapping[str, str], capacity: Capacity, ranks: int) -> Share:
    """The variables to set in the environment of a rank. None, if its share is all that there is: what a framework
    chooses for a whole host is its own matter."""
    threads = share(capacity, ranks)
    if ranks == 1 and threads == capacity.cores:
        return Share(threads, ())
    return Share(
        threads,
        tuple(
            each.name
            for each in VARIABLES
            if not any(env.get(name) for name in (each.name, *each.others))
        ),
    )


def capacity_of(processors: Collection[int], quota: float) -> Capacity:
    """The capacity of these processors. Two hardware threads of a core count once, since compute threads gain little by
    the second one, and slow each other down."""
    return Capacity(len({_core(number) for number in processors}), quota)


def own_capacity() -> Capacity:
    """The capacity of the processors that this process, and those that it starts, may use."""
    return capacity_of(own_processors(), cgroup.quota([cgroup.limits()]))


def give(env: MutableMapping[str, str]) -> None:
    """Set the variables in the environment of a rank that is about to start on this host, if :data:`RANKS` asks for
    it. Those that an earlier job has set are removed."""
    if (earlier := given(env)) is not None:
        for name in (GIVEN, *earlier.names):
            del env[name]
    if ranks := env.pop(RANKS, ""):
        found = shared(env, own_capacity(), int(ranks))
        if found.names:
            put(env, found)


def put(env: MutableMapping[str, str], found: Share) -> None:
    """Set the variables of a share, and record that they were not the user's."""
    env.update(dict.fromkeys(found.names, str(found.threads)))
    env[GIVEN] = " ".join([str(found.threads), *found.names])


def given(env: Mapping[str, str]) -> Share | None:
    """What :func:`give` has set in this environment. Variables that were changed since are left out."""
    threads, *names = env.get(GIVEN, "").split() or [""]
    if not threads:
        return None
    return Share(int(threads), tuple(name for name in names if env.get(name) == threads))


def _core(number: int) -> str:
    try:
        with open(_TOPOLOGY.format(number), encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return str(number)
