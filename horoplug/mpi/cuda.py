"""Which of MPI's collectives take memory of NVIDIA's GPUs, as far as MPI says.

Being "CUDA-aware" is said of messages and of blocking collectives, and the core begins nonblocking ones. Where those
reduce, they may need more than their MPI has: Open MPI's touch the memory from the host, and the process dies of it
(open-mpi/ompi#9845, #12045), while MPICH takes a way through the host. So the answer counts for reductions only in an
MPI that is known to do them."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, Final

from horoplug.mpi import thread as mpi_thread


class OnGpu(enum.IntEnum):
    """The core's numbers (``hp_mpi_on_gpu``)."""

    NOTHING = 0
    MOVES = 1
    ALL = 2


# By how a library's name begins: what is true if it says that it is CUDA-aware. Others: MOVES. Of Intel's nonblocking
# collectives on memory of NVIDIA's GPUs nothing is known.
_IF_IT_SAYS_SO: Final = {"MPICH": OnGpu.ALL, "Intel": OnGpu.NOTHING}

_KINDS: Final = {"cuda", "cuda:device"}  # of memory, in MPI 4.1


def asked(MPI: Any, forced: bool | None = None) -> OnGpu:
    """What MPI takes. It must be initialised, and this thread one that may call it. ``forced``: what the user says."""
    if forced is not None:
        return OnGpu.ALL if forced else OnGpu.NOTHING
    if not says_so(MPI):
        return OnGpu.NOTHING
    name = MPI.Get_library_version()
    known = (level for start, level in _IF_IT_SAYS_SO.items() if name.startswith(start))
    return next(known, OnGpu.MOVES)


def says_so(MPI: Any) -> bool | None:
    """Whether MPI says that it is CUDA-aware; None if it does not answer. As for :func:`asked`."""
    info = MPI.COMM_WORLD.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    # Kinds that mpirun was not told of may be missing there.
    if kinds is not None and _KINDS & {kind.strip() for kind in kinds.split(",")}:
        return True
    # MPICH before 4.0 ends the process in this function if it was built without GPUs.
    if "MPICH" in MPI.Get_library_version() and MPI.Get_version() < (4, 0):
        return None
    function = getattr(mpi_thread.library(MPI), "MPIX_Query_cuda_support", None)
    if function is None:
        return None if kinds is None else False
    function.restype = ctypes.c_int
    return bool(function() == 1)


def describe(MPI: Any) -> str:
    """What MPI says, and what follows from it, in one line. As for :func:`asked`."""
    answer = {
        None: "does not say whether it is",
        True: "says that it is",
        False: "says that it is not",
    }
    taken = {
        OnGpu.NOTHING: "moves no GPU tensors",
        OnGpu.MOVES: "moves GPU tensors, and reduces none",
        OnGpu.ALL: "moves and reduces GPU tensors",
    }
    return f"{answer[says_so(MPI)]} CUDA-aware: it {taken[asked(MPI)]}"
