"""The process in the job: ``init``, ``shutdown``, ranks and sizes, and what this build can do."""

import importlib.util
import operator
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from horoplug._native import gpu_facts
from horoplug.common import gpu
from horoplug.common.context import context
from horoplug.common.process_sets import ProcessSet, add_process_set
from horoplug.mpi import thread as mpi_thread
from horoplug.rendezvous.bootstrap.over_mpi import ranks_of_communicator


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job; does nothing if this process is in it already.

    Under ``horovodrun`` (or with ``HOROVOD_RANK``, ``HOROVOD_SIZE`` … set), ``mpirun``, ``srun``, ``torchrun`` and
    every other launcher of :mod:`horoplug.rendezvous.bootstrap.launcher_environment`, this blocks until every rank is
    here. Otherwise the process is a job of its own: rank 0 of 1. May be called again after :func:`shutdown`, any
    number of times.

    ``comm``: the ranks (of all that were started) that make up this process's job, in the order of their numbers in
    it, or a communicator of mpi4py; by default all. The processes of several such jobs know nothing of each other.
    ``process_sets``: the sets of ranks (:class:`ProcessSet`, or lists) to register, the same on every rank; or the
    string "dynamic", which is accepted for Horovod's sake: sets can be added and removed at any time.

    Raises ValueError for an argument or an environment variable that makes no sense and if the ranks name different
    process sets, HorovodInternalError or horoplug.rendezvous.errors.RendezvousError if the ranks do not find each other
    in time."""
    ranks = _ranks_of(comm)
    sets = _sets_of(process_sets)
    if not context.init(ranks, [each.ranks or [] for each in sets]):
        return
    try:
        _register(sets)
    except BaseException:
        context.shutdown()
        raise


def _ranks_of(comm: Any) -> tuple[int, ...] | None:
    if comm is None:
        return None
    if hasattr(comm, "Get_group"):
        return ranks_of_communicator(comm)
    try:
        return tuple(operator.index(rank) for rank in comm) or None
    except TypeError:
        raise ValueError(
            f"init(comm=...) takes a list of ranks or a communicator of mpi4py, got {type(comm).__name__}."
        ) from None


def _sets_of(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f'init(process_sets={process_sets!r}): it takes a list of process sets or "dynamic".'
            )
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # programs look at it
        return []
    if not isinstance(process_sets, Iterable):
        raise ValueError(
            f"init(process_sets=...) takes a list of process sets, got {type(process_sets).__name__}."
        )
    return [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]


def _register(sets: Sequence[ProcessSet]) -> None:
    lists = [each.ranks for each in sets]
    for number, each in enumerate(sets):
        if each.ranks is not None and each.ranks in lists[:number]:
            raise ValueError(f"init(process_sets=...): entry number {number} is a duplicate.")
        add_process_set(each)


def shutdown() -> None:
    """Leave the job; operations that are in flight fail on every rank. Also done when the process exits."""
    context.shutdown()


def is_initialized() -> bool:
    """Whether :func:`init` was called, and :func:`shutdown` was not."""
    return context.initialized


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write a timeline of the job to a file from now on: JSON that Perfetto (https://ui.perfetto.dev) opens.

    Rank 0 writes it; on other ranks this does nothing, so that every rank may call it. An existing file is replaced,
    and a timeline that is being written is completed first. ``mark_cycles`` marks each round of negotiation.

    Raises ValueError if the job has not been started, or was started without ``HOROVOD_TIMELINE`` (set it to
    ``DYNAMIC``), or if the file cannot be written."""
    context.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline's file, if one is being written; :func:`shutdown` does so too.

    Raises ValueError if the job has not been started."""
    context.engine().timeline_stop()


# Everything below raises NotInitializedError, a ValueError, outside of init ... shutdown.


def rank() -> int:
    """This process's number in the job, from 0."""
    return context.mesh().rank


def size() -> int:
    """Number of processes in the job."""
    return context.mesh().size


def local_rank() -> int:
    """This process's number among those on its host."""
    return context.mesh().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return context.mesh().local_size


def cross_rank() -> int:
    """This host's number among those that have a process of this local_rank."""
    return context.mesh().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process of this local_rank."""
    return context.mesh().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return context.mesh().is_homogeneous


# ---- what this build has; the names are Horovod's -------------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Whether the program may call MPI from several threads beside the job; False where MPI is not used."""
    context.mesh()
    return mpi_thread.thread_level() == "multiple"


def mpi_enabled() -> bool:
    """Whether the ranks have found each other over MPI."""
    return context.over_mpi


def mpi_built() -> bool:
    """Whether ranks can find each other, and send data to other hosts, over MPI: if mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Whether the ranks have found each other without MPI."""
    return not context.over_mpi


def gloo_built() -> bool:
    """Whether the ranks could be connected without MPI: always."""
    return True


def nccl_built() -> int:
    """NCCL's version number (22304 for 2.23.4), or 0 without it. Starts CUDA in this process."""
    found = re.search(r"\[X\] NCCL (\d+)\.(\d+)\.(\d+)", gpu_facts(gpu.libraries()))
    if found is None:
        return 0
    major, minor, patch = map(int, found.groups())
    return 10000 * major + 100 * minor + patch


def ddl_built() -> bool:
    """IBM's DDL: never."""
    return False


def ccl_built() -> bool:
    """Intel's oneCCL: never."""
    return False


def cuda_built() -> bool:
    """Whether tensors in the memory of CUDA devices can be used, where there are any: always."""
    return True


def rocm_built() -> bool:
    """Whether tensors in the memory of ROCm devices can be used."""
    return False
