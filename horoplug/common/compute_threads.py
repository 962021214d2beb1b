"""The compute threads of this process's frameworks, once ``init()`` knows how many ranks share the host.

Frameworks are met in ``sys.modules``: none is imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from horoplug.base import thread_share
from horoplug.base.processors import own_processors

_GPUS = ("/dev/nvidiactl", "/dev/kfd")


class Host(Protocol):
    """What the ranks of a host may use together."""

    processors: frozenset[int]
    quota: float


class _Framework(NamedTuple):
    name: str
    module: str
    threads: Callable[[Any], int]
    """The number of compute threads, for the module."""
    variable: str
    """What limits it."""
    computes_on_gpus: bool
    """Whether its threads do little on a host with GPUs."""


def _of_tensorflow(module: Any) -> int:
    set_here = module.config.threading.get_intra_op_parallelism_threads()
    return int(set_here) or _from_environment("TF_NUM_INTRAOP_THREADS")


def _from_environment(*names: str) -> int:
    """The number in the first variable that is set, by default the number of processors of this process."""
    texts = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal()), 0) or len(own_processors())


_FRAMEWORKS: Final = (
    _Framework(
        "PyTorch", "torch", lambda module: int(module.get_num_threads()), "OMP_NUM_THREADS", False
    ),
    _Framework("TensorFlow", "tensorflow", _of_tensorflow, "TF_NUM_INTRAOP_THREADS", True),
    _Framework("JAX", "jax", lambda _: _from_environment("PJRT_NPROC", "NPROC"), "NPROC", True),
)


def settle(host: Host, ranks: int, *, other_launcher: bool) -> str:
    """Let the threads follow the number of ranks of this host, if the launcher has limited them. Returns a line for the
    user: about the limit, or about frameworks that exceed the share under another launcher; empty: nothing to say."""
    given = thread_share.given(os.environ)
    if given is None and not other_launcher:
        return ""
    capacity = thread_share.capacity_of(host.processors, host.quota)
    threads = thread_share.share(capacity, ranks)
    where = f"each of the {ranks} ranks of this host" if ranks > 1 else "the rank of this host"
    of = f"{capacity.cores} core{'s' if capacity.cores > 1 else ''}"
    if 0 < capacity.quota < capacity.cores:
        of += f" and a CPU quota of {capacity.quota:g}"
    if given is None:
        most = next(_excessive(threads), None)
        if most is None:
            return ""
        found, number = most
        return (
            f"{found.name} has {number} compute threads in {where}, which has {of}: set {found.variable}={threads} "
            "(HOROVOD_THREAD_SHARE=0: do not compare)"
        )
    if threads != given.threads:
        _follow(given, threads)
    names = [
        each.name
        for each in thread_share.VARIABLES
        if each.name in given.names and any(name in sys.modules for name in each.readers)
    ]
    if not names:
        return ""
    values = ", ".join(f"{name}={threads}" for name in names)
    return (
        f"{where} computes with {threads} thread{'s' if threads > 1 else ''}, its share of {of} ({values}); other "
        "values of these variables take precedence, and HOROVOD_THREAD_SHARE=0 ends the sharing"
    )


def _excessive(threads: int) -> Iterator[tuple[_Framework, int]]:
    """The imported frameworks that have more threads, and how many."""
    has_gpus = any(os.path.exists(path) for path in _GPUS)
    for each in _FRAMEWORKS:
        module = sys.modules.get(each.module)
        if module is None or (each.computes_on_gpus and has_gpus):
            continue
        try:
            number = each.threads(module)
        except AttributeError:  # the module is being imported, or is another one of this name
            continue
        if number > threads:
            yield each, number


def _follow(given: thread_share.Share, threads: int) -> None:
    """Change the number of threads from what was given. PyTorch can do so at any time, unless the program has chosen
    another number; the other frameworks read the variables once, so that only later processes follow."""
    torch = sys.modules.get("torch")
    is_given = torch is not None and "OMP_NUM_THREADS" in given.names
    if is_given and getattr(torch, "get_num_threads", int)() == given.threads:
        torch.set_num_threads(threads)  # type: ignore[union-attr]
    thread_share.put(os.environ, thread_share.Share(threads, given.names))
