"""The libraries that a benchmark can measure, horoplug and its peers, behind one interface.

``prepare(case)`` returns an input and a function that runs the collective of the case on it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from horoplug.bench.cases import OPS, Case, Prepared, Run, partner_of, prepare, round_trip

BARE_TCP = Path(__file__).resolve().parent.parent / "bare_tcp.c"


class OfTensors(Prepared):
    """The output is a tensor of PyTorch, perhaps of a type that NumPy does not know."""

    def result(self) -> np.ndarray:
        import torch

        self.run()
        bits = getattr(torch, f"int{8 * self.x.itemsize}")
        return self.output.contiguous().view(bits).numpy().view(self.x.dtype).ravel()


class Peer:
    """A library on the ranks of a job of horoplug's, given as ``hvd``."""

    name: str
    needs_mpi: ClassVar[bool] = False
    version: str = ""

    def __init__(self, hvd: Any) -> None:
        raise NotImplementedError

    def prepare(self, case: Case) -> Prepared:
        """Create the input and the operation of a case. Raises SystemExit if the library does not support it."""
        raise NotImplementedError

    def close(self) -> None:
        """Shut the library down."""


class Horoplug(Peer):
    """horoplug's NumPy functions, in place if that variant exists."""

    name = "horoplug"

    def __init__(self, hvd: Any = None) -> None:
        if hvd is None:
            import horoplug as hvd
        self.hvd = hvd
        hvd.init()

    def prepare(self, case: Case) -> Prepared:
        return prepare(self.hvd, case)


class TorchDistributed(Peer):
    """torch.distributed with one of its backends, on preallocated outputs."""

    backend: ClassVar[str]
    averages: ClassVar[bool]

    def __init__(self, hvd: Any) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.size = torch, dist, hvd.size()
        self.version = f"torch {torch.__version__}"
        R = dist.ReduceOp
        average = R.AVG if self.averages else None
        self.ops = dict(zip(OPS, (R.SUM, average, R.MIN, R.MAX, R.PRODUCT), strict=True))
        if dist.is_initialized():  # by a peer with another backend
            self.group = dist.new_group(backend=self.backend)
            return
        first = hvd.rank() == 0
        here = os.environ.get("MASTER_ADDR") or platform.node()
        address = hvd.broadcast_object(here if hvd.cross_size() > 1 else "127.0.0.1")
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if first else None
        port = hvd.broadcast_object(store.port if store else None)
        store = store or dist.TCPStore(address, port)
        dist.init_process_group(self.backend, store=store, rank=hvd.rank(), world_size=self.size)
        self.group = dist.group.WORLD

    def prepare(self, case: Case) -> Prepared:
        dist, op, group = self.dist, self.ops[case.op], self.group
        if op is None:
            raise SystemExit(f"{self.backend} has no average")
        x = np.empty(case.count, case.dtype)
        t = as_tensor(self.torch, x)
        gathered = t.new_empty(case.count * self.size)
        exchanged = self.torch.empty_like(t)
        scattered = t.new_empty(case.count // self.size)
        runs: dict[str, Run] = {
            "allreduce": lambda: dist.all_reduce(t, op, group),
            "allgather": lambda: dist.all_gather_into_tensor(gathered, t, group),
            "broadcast": lambda: dist.broadcast(t, 0, group),
            "alltoall": lambda: dist.all_to_all_single(exchanged, t, group=group),
            "reducescatter": lambda: dist.reduce_scatter_tensor(scattered, t, op, group),
            "barrier": lambda: dist.barrier(group),
        }
        outputs = {"allgather": gathered, "alltoall": exchanged, "reducescatter": scattered}
        if case.collective == "sendrecv":
            rank = dist.get_rank()
            other = partner_of(rank, self.size)
            send = lambda: dist.send(t, other, group)  # noqa: E731
            receive = lambda: dist.recv(exchanged, other, group)  # noqa: E731
            return OfTensors(x, round_trip(rank, send, receive), exchanged)
        return OfTensors(x, runs[case.collective], outputs.get(case.collective, t))

    def close(self) -> None:
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


class TorchGloo(TorchDistributed):
    """torch.distributed with Gloo."""

    name, backend, averages = "torch-gloo", "gloo", False


class TorchHoroplug(TorchDistributed):
    """torch.distributed with horoplug."""

    name, backend, averages = "torch-horoplug", "horoplug", True


class Mpi4py(Peer):
    """mpi4py's buffer functions, on preallocated outputs."""

    name = "mpi4py"
    needs_mpi = True

    def __init__(self, hvd: Any) -> None:
        from mpi4py import MPI

        self.MPI, self.comm, self.size = MPI, MPI.COMM_WORLD, hvd.size()
        self.version = " ".join(re.split(r"[\n,]", MPI.Get_library_version())[0].split())
        if (self.comm.size, self.comm.rank) != (hvd.size(), hvd.rank()):
            raise SystemExit(
                f"--peer mpi4py: MPI sees rank {self.comm.rank} of {self.comm.size} where horoplug sees "
                f"{hvd.rank()} of {hvd.size()}; start the benchmark with -np or under mpirun"
            )
        self.ops = dict(zip(OPS, (MPI.SUM, None, MPI.MIN, MPI.MAX, MPI.PROD), strict=True))

    def prepare(self, case: Case) -> Prepared:
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
            "barrier": comm.Barrier,
        }
        outputs = {"allgather": gathered, "alltoall": exchanged, "reducescatter": scattered}
        if case.collective == "sendrecv":
            other = partner_of(comm.rank, self.size)
            send, receive = lambda: comm.Send(x, other), lambda: comm.Recv(exchanged, other)
            return Prepared(x, round_trip(comm.rank, send, receive), exchanged)
        return Prepared(x, runs[case.collective], outputs.get(case.collective, x))


class OnTensors(Peer):
    """The functions of horoplug and Horovod on PyTorch tensors, of which the API is the same."""

    def __init__(self, theirs: Any) -> None:
        import torch

        self.torch, self.theirs = torch, theirs
        reductions = theirs.Sum, theirs.Average, theirs.Min, theirs.Max, theirs.Product
        self.ops = dict(zip(OPS, reductions, strict=True))

    def prepare(self, case: Case) -> Prepared:
        if case.collective == "sendrecv":
            raise SystemExit(f"{self.name} has no send and recv that can be measured")
        x = np.empty(case.count, case.dtype)
        theirs, op, t = self.theirs, self.ops[case.op], as_tensor(self.torch, x)
        name = f"{self.name}.{case.name}"
        runs: dict[str, Run] = {
            "allreduce": lambda: theirs.allreduce_(t, op=op, name=name),
            "allgather": lambda: theirs.allgather(t, name=name),
            "broadcast": lambda: theirs.broadcast_(t, root_rank=0, name=name),
            "alltoall": lambda: theirs.alltoall(t, name=name),
            "reducescatter": lambda: theirs.reducescatter(t, op=op, name=name),
            "barrier": theirs.barrier,
        }
        return Prepared(x, runs[case.collective], x if case.collective == "barrier" else None)


class HoroplugTorch(OnTensors):
    """horoplug's functions on PyTorch tensors, in the job of its functions on NumPy arrays."""

    name = "horoplug-torch"

    def __init__(self, hvd: Any) -> None:
        import horoplug.torch as theirs

        super().__init__(theirs)
        self.version = f"torch {self.torch.__version__}"


class Horovod(OnTensors):
    """Horovod on PyTorch tensors. It must have been built with MPI; mpirun starts the ranks."""

    name = "horovod"
    needs_mpi = True

    def __init__(self, hvd: Any) -> None:
        import horovod.torch as theirs

        theirs.init()
        if (theirs.size(), theirs.rank()) != (hvd.size(), hvd.rank()):
            raise SystemExit(f"Horovod sees {theirs.size()} ranks where horoplug sees {hvd.size()}")
        super().__init__(theirs)
        self.version = f"Horovod {sys.modules['horovod'].__version__}"

    def close(self) -> None:
        self.theirs.shutdown()


class BareTcp(Peer):
    """bare_tcp.c: an allreduce of two ranks by hand over one TCP connection, which shows what network and processors
    allow."""

    name = "bare-tcp"

    def __init__(self, hvd: Any) -> None:
        if hvd.size() != 2:
            raise SystemExit("--peer bare-tcp: a connection has two ends, so it needs two ranks")
        self.rank = hvd.rank()
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "bare_tcp.so"
            compiler = os.environ.get("CC", "cc")
            subprocess.run(
                [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", library, BARE_TCP],
                check=True,
            )
            self.allreduce = ctypes.CDLL(str(library)).bare_allreduce
        self.allreduce.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        self.socket = self._connect(hvd)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.version = f"C, {compiler} -O3"

    def _connect(self, hvd: Any) -> socket.socket:
        address = os.environ.get("MASTER_ADDR") or platform.node()
        if hvd.cross_size() == 1:
            address = "127.0.0.1"
        address = hvd.broadcast_object(address)
        if self.rank:
            return socket.create_connection((address, hvd.broadcast_object(None)), timeout=60)
        with socket.create_server((address, 0)) as server:
            server.settimeout(60)
            hvd.broadcast_object(server.getsockname()[1])
            return server.accept()[0]

    def prepare(self, case: Case) -> Prepared:
        if case.collective != "allreduce" or case.op != "sum" or case.dtype != np.float32:
            raise SystemExit("--peer bare-tcp: only an allreduce of float32 with the sum")
        x = np.empty(case.count, case.dtype)
        fd, address, count = self.socket.fileno(), x.ctypes.data, x.size

        def run() -> None:
            if self.allreduce(fd, self.rank, address, count):
                raise OSError("the connection of bare_tcp.c has failed")

        return Prepared(x, run, x)

    def close(self) -> None:
        self.socket.close()


PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (TorchGloo, TorchHoroplug, HoroplugTorch, Mpi4py, Horovod, BareTcp)
}


def as_tensor(torch: Any, x: np.ndarray) -> Any:
    """A tensor in the memory of an array. Dtypes that PyTorch does not accept from NumPy, such as bfloat16, have the
    same names in both."""
    bits = x if x.dtype.kind in "biuf" else x.view(f"i{x.dtype.itemsize}")
    return torch.from_numpy(bits).view(getattr(torch, x.dtype.name))
