"""The libraries that a benchmark can measure: horoplug, and peers to compare with, all behind one method.

``prepare(case)`` gives an input array and a function that runs the case's collective on it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Run = Callable[[], Any]
"""One operation on the input; returns the output, which may be the input."""

OPS = ("sum", "avg", "min", "max", "prod")


@dataclass(frozen=True)
class Case:
    """What is measured: ``count`` elements per rank as input of ``collective``."""

    collective: str
    dtype: np.dtype[Any]
    op: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.collective}.{self.dtype}.{self.op}.{self.count}"


class Horoplug:
    """horoplug's NumPy functions; in place where there is such a variant."""

    def __init__(self) -> None:
        import horoplug as hvd

        self.hvd = hvd
        hvd.init()
        self.ops = dict(
            zip(OPS, (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product), strict=True)
        )

    def prepare(self, case: Case) -> tuple[np.ndarray, Run]:
        hvd, x, name, op = self.hvd, np.empty(case.count, case.dtype), case.name, self.ops[case.op]
        runs: dict[str, Run] = {
            "allreduce": lambda: hvd.allreduce_(x, op=op, name=name),
            "allgather": lambda: hvd.allgather(x, name=name),
            "broadcast": lambda: hvd.broadcast_(x, root_rank=0, name=name),
            "alltoall": lambda: hvd.alltoall(x, name=name),
            "reducescatter": lambda: hvd.reducescatter(x, op=op, name=name),
        }
        return x, runs[case.collective]


class TorchGloo:
    """torch.distributed with gloo, on preallocated outputs."""

    def __init__(self, hvd: Any) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.size = torch, dist, hvd.size()
        R = dist.ReduceOp
        self.ops = dict(zip(OPS, (R.SUM, None, R.MIN, R.MAX, R.PRODUCT), strict=True))
        first = hvd.rank() == 0
        here = os.environ.get("MASTER_ADDR") or platform.node()
        address = hvd.broadcast_object(here if hvd.cross_size() > 1 else "127.0.0.1")
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if first else None
        port = hvd.broadcast_object(store.port if store else None)
        store = store or dist.TCPStore(address, port)
        dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=self.size)

    def prepare(self, case: Case) -> tuple[np.ndarray, Run]:
        torch, dist, op = self.torch, self.dist, self.ops[case.op]
        if op is None:
            raise SystemExit("gloo has no average")
        x = np.empty(case.count, case.dtype)
        # Types that torch does not take from NumPy, such as bfloat16, have their names in common.
        bits = x if case.dtype.kind in "biuf" else x.view(f"i{case.dtype.itemsize}")
        t = torch.from_numpy(bits).view(getattr(torch, case.dtype.name))
        gathered = t.new_empty(case.count * self.size)
        exchanged = torch.empty_like(t)
        scattered = t.new_empty(case.count // self.size)
        runs: dict[str, Run] = {
            "allreduce": lambda: dist.all_reduce(t, op),
            "allgather": lambda: dist.all_gather_into_tensor(gathered, t),
            "broadcast": lambda: dist.broadcast(t, 0),
            "alltoall": lambda: dist.all_to_all_single(exchanged, t),
            "reducescatter": lambda: dist.reduce_scatter_tensor(scattered, t, op),
        }
        return x, runs[case.collective]


class Mpi4py:
    """mpi4py's buffer functions, on preallocated outputs."""

    def __init__(self, hvd: Any) -> None:
        from mpi4py import MPI

        self.MPI, self.comm, self.size = MPI, MPI.COMM_WORLD, hvd.size()
        if (self.comm.size, self.comm.rank) != (hvd.size(), hvd.rank()):
            raise SystemExit(
                f"--peer mpi4py: MPI sees rank {self.comm.rank} of {self.comm.size} where horoplug sees "
                f"{hvd.rank()} of {hvd.size()}; start the benchmark with -np or under mpirun"
            )
        self.ops = dict(zip(OPS, (MPI.SUM, None, MPI.MIN, MPI.MAX, MPI.PROD), strict=True))

    def prepare(self, case: Case) -> tuple[np.ndarray, Run]:
        comm, op = self.comm, self.ops[case.op]
        if op is None or case.dtype.char not in "?bBhHiIlLqQfd":
            raise SystemExit(f"MPI has no {case.op} of {case.dtype}")
        x = np.empty(case.count, case.dtype)
        gathered = np.empty(case.count * self.size, case.dtype)
        exchanged = np.empty_like(x)
        scattered = np.empty(case.count // self.size, case.dtype)
        runs: dict[str, Run] = {
            "allreduce": lambda: comm.Allreduce(self.MPI.IN_PLACE, x, op),
            "allgather": lambda: comm.Allgather(x, gathered),
            "broadcast": lambda: comm.Bcast(x, 0),
            "alltoall": lambda: comm.Alltoall(x, exchanged),
            "reducescatter": lambda: comm.Reduce_scatter_block(x, scattered, op),
        }
        return x, runs[case.collective]


PEERS = {"torch-gloo": TorchGloo, "mpi4py": Mpi4py}
