"""``init``, ``shutdown``, ranks and sizes, timelines, and the capabilities of this build."""

import importlib.util
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

from horoplug._native import nccl_version
from horoplug.base.errors import HorovodInternalError
from horoplug.base.log import logger
from horoplug.common import gpu
from horoplug.common.context import context
from horoplug.common.process_sets import (
    ProcessSet,
    global_process_set,
    register,
    restore_added_sets,
)
from horoplug.mpi import thread as mpi_thread
from horoplug.rendezvous.bootstrap.over_mpi import ranks_of_communicator


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job. Does nothing if this process has joined already.

    Under ``horovodrun`` (or with ``HOROVOD_RANK``, ``HOROVOD_SIZE`` and so on set), ``mpirun``, ``srun``, ``torchrun``
    and the other launchers in :mod:`horoplug.rendezvous.bootstrap.launcher_environment`, this blocks until every rank
    has joined. Without a launcher, the process is a job of one rank. May be called again after :func:`shutdown`, any
    number of times.

    ``comm``: the processes of this job, as a list of the ranks that the launcher gave them or a communicator of mpi4py;
    rank i of the job is entry i. By default, all processes. Other processes may form other, independent jobs.
    ``process_sets``: process sets (:class:`ProcessSet`, or lists of ranks) to register, the same on every rank; or the
    string "dynamic", which is accepted for compatibility with Horovod: sets can be added and removed at any time. In an
    elastic job, sets with ranks that do not exist now are left out, and ``hvd.elastic.run`` registers the sets again.

    Raises ValueError for an invalid argument or environment variable and if the ranks give different process sets,
    HorovodInternalError or horoplug.rendezvous.errors.RendezvousError if the ranks do not find each other in time.

    Example, on two ranks:

        hvd.init(process_sets=[[0], [0, 1]])
        hvd.size()  # -> 2
    """
    _init(comm, process_sets, is_reset=False)


def initialize_again() -> None:
    """Leave the job, if it still exists, and form it again, with the process sets of the last ``init`` and those that
    the program has added since. Collective."""
    context.shutdown()
    _init(None, context.initial_sets, is_reset=True)


def _init(comm: Any, process_sets: Any, *, is_reset: bool) -> None:
    ranks = _ranks_of(comm)
    sets = _sets_of(process_sets)
    while context.init(ranks, [each.ranks or [] for each in sets]):
        context.initial_sets = process_sets
        try:
            _register(_possible(sets) if context.is_elastic else sets)
            if context.is_elastic or is_reset:  # in an elastic job, other ranks may be in a reset
                restore_added_sets()
        except HorovodInternalError as error:
            context.shutdown()
            if not context.is_elastic:
                raise
            logger.warning("elastic: the processes connect again: %s", error)
        except BaseException:
            context.shutdown()
            raise
        else:
            context.added_sets.is_newcomer = False
            return


def _ranks_of(comm: Any) -> tuple[int, ...] | None:
    if comm is None:
        return None
    if hasattr(comm, "Get_group"):
        return ranks_of_communicator(comm)
    try:
        return tuple(operator.index(rank) for rank in comm) or None
    except TypeError:
        raise ValueError(
            f"init(comm=...) takes a list of ranks or a communicator of mpi4py, got {type(comm).__name__}"
        ) from None


def _sets_of(process_sets: Any) -> list[ProcessSet]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f'init(process_sets={process_sets!r}): it takes a list of process sets or "dynamic"'
            )
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # programs read it
        return []
    if not isinstance(process_sets, Iterable):
        raise ValueError(
            f"init(process_sets=...) takes a list of process sets, got {type(process_sets).__name__}"
        )
    return [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]


def _possible(sets: Sequence[ProcessSet]) -> list[ProcessSet]:
    """Those of the sets that can be registered with the number of ranks that an elastic job has now. Sets of all ranks
    stand for the global set then."""
    size, found = context.connections().size, []
    for each in sets:
        each._invalidate()
        if each.ranks == list(range(size)):
            each.process_set_id = global_process_set.process_set_id
        elif max(each.ranks or [0]) < size:
            found.append(each)
    return found


def _register(sets: Sequence[ProcessSet]) -> None:
    lists = [each.ranks for each in sets]
    for number, each in enumerate(sets):
        if each.ranks is not None and each.ranks in lists[:number]:
            raise ValueError(f"init(process_sets=...): entry number {number} is a duplicate")
        register(each)


def shutdown() -> None:
    """Leave the job. Operations in flight fail on every rank. Does nothing without a job. Called automatically when the
    process exits.

    Raises nothing.

    Example, on two ranks:

        hvd.shutdown()
        hvd.is_initialized()  # -> False
        hvd.init()
        hvd.is_initialized()  # -> True
    """
    context.shutdown()
    context.added_sets.clear()


def is_initialized() -> bool:
    """Whether this process is in a job: between :func:`init` and :func:`shutdown`. Raises nothing.

    Example, on two ranks:

        hvd.is_initialized()  # -> True
    """
    return context.initialized


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write a timeline of the job to the file ``file_path`` from now on, in Chrome's trace format, which Perfetto opens
    (https://ui.perfetto.dev).

    Rank 0 writes the file; on other ranks this does nothing. An existing file is replaced. If a timeline is being
    written already, it is completed first. ``mark_cycles`` marks each round of negotiation.

    Raises ValueError before ``init``, if ``HOROVOD_TIMELINE`` was not set (to ``DYNAMIC`` or a file) at ``init``, or if
    the file cannot be written.

    Example, of a job with ``HOROVOD_TIMELINE=DYNAMIC``:

        hvd.start_timeline("timeline.json", mark_cycles=True)
        hvd.barrier()
        hvd.stop_timeline()
    """
    context.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file of the timeline, if one is being written. :func:`shutdown` does so as well.

    Raises ValueError before ``init``.

    Example, of a job with ``HOROVOD_TIMELINE=DYNAMIC``:

        hvd.start_timeline("timeline.json")
        hvd.barrier()
        hvd.stop_timeline()
    """
    context.engine().timeline_stop()


# The functions below raise NotInitializedError, a ValueError, before init and after shutdown.


def rank() -> int:
    """The rank of this process, from 0.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.rank()  # -> 0 on rank 0, 1 on rank 1
    """
    return context.connections().rank


def size() -> int:
    """Number of processes in the job.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.size()  # -> 2
    """
    return context.connections().size


def local_rank() -> int:
    """The rank of this process among those on its host.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.local_rank()  # -> 0 on rank 0, 1 on rank 1
    """
    return context.connections().local_rank


def local_size() -> int:
    """Number of processes on this host.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.local_size()  # -> 2
    """
    return context.connections().local_size


def cross_rank() -> int:
    """The rank of this process among those with its local rank, one on each host.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.cross_rank()  # -> 0
    """
    return context.connections().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with this local rank.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.cross_size()  # -> 1
    """
    return context.connections().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, on two ranks of one host:

        hvd.is_homogeneous()  # -> True
    """
    return context.connections().is_homogeneous


# ---- capabilities of this build; the names are Horovod's ------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Whether the program may call MPI from several threads while the job runs; False if MPI is not used.

    Raises NotInitializedError before ``init`` and after ``shutdown``.

    Example, of a job without MPI:

        hvd.mpi_threads_supported()  # -> False
    """
    context.connections()
    return mpi_thread.thread_level() == "multiple"


def mpi_enabled() -> bool:
    """Whether the rendezvous of the ranks used MPI. Raises nothing.

    Example, of a job that ``horovodrun`` has started:

        hvd.mpi_enabled()  # -> False
    """
    return context.over_mpi


def mpi_built() -> bool:
    """Whether MPI can be used, for the rendezvous and for data: whether mpi4py is installed. Raises nothing.

    Example:

        import importlib.util

        hvd.mpi_built() == (importlib.util.find_spec("mpi4py") is not None)  # -> True
    """
    return importlib.util.find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Whether the rendezvous of the ranks did not use MPI. Raises nothing.

    Example, of a job that ``horovodrun`` has started:

        hvd.gloo_enabled()  # -> True
    """
    return not context.over_mpi


def gloo_built() -> bool:
    """Whether ranks can connect without MPI: always True. Raises nothing.

    Example:

        hvd.gloo_built()  # -> True
    """
    return True


def nccl_built() -> int:
    """The version of NCCL as a number (22304 for 2.23.4), or 0 if there is none. Raises nothing.

    Example:

        version = hvd.nccl_built()
        print(f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100}" if version else "no NCCL")
    """
    return nccl_version(gpu.libraries())


def ddl_built() -> bool:
    """Whether there is support for IBM's DDL: always False. Raises nothing.

    Example:

        hvd.ddl_built()  # -> False
    """
    return False


def ccl_built() -> bool:
    """Whether there is support for Intel's oneCCL: always False. Raises nothing.

    Example:

        hvd.ccl_built()  # -> False
    """
    return False


def cuda_built() -> bool:
    """Whether tensors on CUDA devices are supported: always True. Raises nothing.

    Example:

        hvd.cuda_built()  # -> True
    """
    return True


def rocm_built() -> bool:
    """Whether tensors on ROCm devices are supported: always False. Raises nothing.

    Example:

        hvd.rocm_built()  # -> False
    """
    return False
