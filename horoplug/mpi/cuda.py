"""Determines which of MPI's collectives accept memory of NVIDIA GPUs.

"CUDA-aware" covers point-to-point messages and blocking collectives, but the core starts nonblocking collectives. A
CUDA-aware MPI may lack nonblocking reductions of GPU memory: those of Open MPI access the memory from the host, which
crashes the process (open-mpi/ompi#9845, #12045), while those of MPICH stage through host memory. Therefore the core
uses reductions only with an MPI that is known to support them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from horoplug._native import MpiOnGpu
from horoplug.mpi import thread

# By the beginning of the library's version text: the support that a CUDA-aware build has. Others: MOVES. Whether Intel
# MPI's nonblocking collectives accept NVIDIA GPU memory is not documented.
_SUPPORT_IF_CUDA_AWARE: Final = {"MPICH": MpiOnGpu.ALL, "Intel": MpiOnGpu.NOTHING}

_CUDA_MEMORY_KINDS: Final = {"cuda", "cuda:device"}  # as MPI 4.1 names them


def gpu_support(MPI: Any, forced: bool | None = None) -> MpiOnGpu:
    """What the initialised MPI does with GPU memory. Call it on a thread that may call MPI.

    ``forced``: the user's setting, which overrides what MPI reports."""
    if forced is not None:
        return MpiOnGpu.ALL if forced else MpiOnGpu.NOTHING
    if not reports_cuda_aware(MPI):
        return MpiOnGpu.NOTHING
    name = MPI.Get_library_version()
    known = (level for start, level in _SUPPORT_IF_CUDA_AWARE.items() if name.startswith(start))
    return next(known, MpiOnGpu.MOVES)


def reports_cuda_aware(MPI: Any) -> bool | None:
    """Whether MPI reports that it is CUDA-aware; None if it reports nothing. Call it as :func:`gpu_support`."""
    info = MPI.COMM_WORLD.Get_info()
    try:
        kinds = info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()
    # The list may lack kinds that mpirun was not asked for, so their absence proves nothing.
    if kinds is not None and _CUDA_MEMORY_KINDS & {kind.strip() for kind in kinds.split(",")}:
        return True
    # A CPU-only MPICH before 4.0 aborts the process in MPIX_Query_cuda_support.
    if "MPICH" in MPI.Get_library_version() and MPI.Get_version() < (4, 0):
        return None
    function = getattr(thread.library(MPI), "MPIX_Query_cuda_support", None)
    if function is None:
        return None if kinds is None else False
    function.restype = ctypes.c_int
    return bool(function() == 1)


def describe(MPI: Any) -> str:
    """One line for ``--check-build -v``: what MPI reports and how horoplug uses it. Call it as :func:`gpu_support`."""
    answer = {
        None: "does not say whether it is",
        True: "says that it is",
        False: "says that it is not",
    }
    used_for = {
        MpiOnGpu.NOTHING: "moves no GPU tensors",
        MpiOnGpu.MOVES: "moves GPU tensors, and reduces none",
        MpiOnGpu.ALL: "moves and reduces GPU tensors",
    }
    return f"{answer[reports_cuda_aware(MPI)]} CUDA-aware: it {used_for[gpu_support(MPI)]}"
