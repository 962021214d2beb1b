"""``horovod.common.basics``: ``init``, ``rank``, ``size`` and similar functions as methods of an object."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from horoplug.common import process_sets, reduce_ops
from horoplug.common.context import context
from horoplug.common.process_sets import ProcessSet

_FUNCTIONS: Final = (
    *("init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "is_homogeneous"),
    *("size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"),
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built"),
)


class HorovodBasics:
    """The functions of :mod:`horoplug.common.api` as methods.

    The arguments of the constructor, which name Horovod's C library, are ignored."""

    Average = reduce_ops.Average
    Sum = reduce_ops.Sum
    Adasum = reduce_ops.Adasum
    Min = reduce_ops.Min
    Max = reduce_ops.Max
    Product = reduce_ops.Product

    def __init__(self, pkg_path: str | None = None, *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _FUNCTIONS:
            api = importlib.import_module("horoplug.common.api")
            function: Callable[..., Any] | None = getattr(api, name, None)
            if function is None:
                raise AttributeError(f"horoplug does not provide {name} yet")
            return function
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- private methods that Horovod's tests use --------------------------------------------------------------------

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of each process set, by the set's id."""
        return process_sets._get_process_set_ids_and_ranks()

    def _ranks_of(self, process_set_id: int) -> list[int]:
        ranks = self._get_process_set_ids_and_ranks().get(process_set_id)
        if ranks is None:
            raise ValueError(f"there is no process set {process_set_id} in this job")
        return ranks

    def _process_set_size(self, process_set_id: int) -> int:
        """Number of ranks in a process set. Raises ValueError for an unknown id."""
        return len(self._ranks_of(process_set_id))

    def _process_set_rank(self, process_set_id: int) -> int:
        """This process's rank in a process set. Raises ValueError for an unknown id, or if the process is not in it."""
        ranks, rank = self._ranks_of(process_set_id), context.connections().rank
        if rank not in ranks:
            raise ValueError(f"rank {rank} is not in process set {process_set_id}")
        return ranks.index(rank)

    def _add_process_set_impl(self, ranks: Iterable[int]) -> int | None:
        """Register a process set and return its id. Collective."""
        return process_sets.add_process_set(list(ranks)).process_set_id

    def _remove_process_set_impl(self, process_set_id: int) -> int | None:
        """Remove a process set. Returns its id, or None if it could not be removed. Collective."""
        unwanted = ProcessSet(self._ranks_of(process_set_id))
        unwanted.process_set_id = process_set_id
        return process_set_id if process_sets.remove_process_set(unwanted) else None

    def _comm_process_set_id(self, comm: Any) -> int:
        """Always raises ValueError: process sets cannot be found by an MPI communicator."""
        raise ValueError(
            "process sets cannot be found by their communicator; give the ranks of the process set"
        )


_basics = HorovodBasics()
