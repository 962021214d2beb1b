"""Jobs that another launcher than ``horovodrun`` has started: who this process is, and how it finds the others.

:data:`LAUNCHERS` says by which variables a launcher is recognised. Variables of Horovod's own are stronger: where
``HOROVOD_SIZE`` is set, nobody else is asked. For processes of an MPI the rendezvous is arranged over MPI, which mpi4py
opens: rank 0 serves the store, and tells the others its address and a new secret."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from horoplug.common.config import SECRET_BYTES, Config

from .hosts import host_key, interface_address
from .mpi import initialise
from .server import StoreServer


class Launcher(NamedTuple):
    """One way to start processes, and the variables in which it tells each of them its place."""

    name: str
    rank: str
    size: str


LAUNCHERS: Final = (
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
)


class Launched(NamedTuple):
    """This process as its launcher has it."""

    launcher: Launcher
    rank: int
    size: int


def recognise(env: Mapping[str, str]) -> Launched | None:
    """Who has started this process; None for ``horovodrun``, for nobody, and for jobs of one process."""
    if any(env.get(name, "").strip() for name in ("HOROPLUG_SIZE", "HOROVOD_SIZE")):
        return None
    for launcher in LAUNCHERS:
        rank, size = env.get(launcher.rank, ""), env.get(launcher.size, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) > 1:
            return Launched(launcher, int(rank), int(size))
    return None


class Meeting(NamedTuple):
    """What the processes have agreed on: their places, and where the rendezvous is."""

    rank: int
    size: int
    address: str
    port: int
    secret: bytes

    def apply(self, config: Config) -> Config:
        """The configuration with this process's place and the rendezvous."""
        return dataclasses.replace(
            config,
            rank=self.rank,
            size=self.size,
            rendezvous_addr=self.address,
            rendezvous_port=self.port,
            rendezvous_server="launcher",
            secret_key=self.secret,
        )


def meet(config: Config, launched: Launched) -> tuple[Meeting, StoreServer | None]:
    """Agree on a rendezvous; on rank 0 with its server, which is to be closed.

    Collective over the processes of the MPI. Raises ValueError of one line if they cannot meet."""
    communicator = _world(launched)
    server, told = None, b""
    alone = _are_on_one_host(communicator, config)
    if communicator.rank == 0:
        server, told = _serve(config, alone)
    told = _from_rank_0(communicator, told)
    if told[:1] != b"+":
        raise ValueError(told[1:].decode())
    secret, place = told[1 : 1 + SECRET_BYTES], told[1 + SECRET_BYTES :].decode()
    address, port = place.split()
    return Meeting(communicator.rank, communicator.size, address, int(port), secret), server


def _world(launched: Launched) -> Any:
    """MPI's communicator of all processes that the launcher has started."""
    started = f"{launched.launcher.name} has started {launched.size} processes"
    try:
        import mpi4py
    except ImportError:
        raise ValueError(
            f"{started}, which find each other over MPI, and that needs mpi4py: pip install mpi4py, or start the job "
            "with horovodrun."
        ) from None
    try:
        MPI = importlib.import_module(f"{mpi4py.__name__}.MPI")
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{started}, but mpi4py cannot use an MPI library: {reason}. Set MPI4PY_LIBMPI to the libmpi.so of that "
            "mpirun, or start the job with horovodrun."
        ) from None
    initialise(MPI)
    world = MPI.COMM_WORLD
    if (world.size, world.rank) != (launched.size, launched.rank):
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
        raise ValueError(
            f"{started}, but for {library}, which mpi4py uses, this is rank {world.rank} of {world.size}: start the "
            "job with the mpirun that belongs to it, or set MPI4PY_LIBMPI to the libmpi.so of the one you use."
        )
    return world


def _are_on_one_host(communicator: Any, config: Config) -> bool:
    own = hashlib.sha256(host_key(config.hostname).encode()).digest()
    everyones = bytearray(len(own) * communicator.size)
    communicator.Allgather(own, everyones)
    return everyones == own * communicator.size


def _serve(config: Config, alone: bool) -> tuple[StoreServer | None, bytes]:
    """A server on rank 0, and what the others need to know of it, or what they are to raise."""
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        address = "127.0.0.1" if alone else _address(config)
        server = StoreServer(secret, address)
    except (OSError, ValueError) as error:
        return None, f"-rank 0 cannot serve the rendezvous: {error}".encode()
    return server, b"+" + secret + f"{server.address[0]} {server.address[1]}".encode()


def _address(config: Config) -> str:
    """Where other hosts reach this one."""
    if config.gloo_iface:
        return interface_address(config.gloo_iface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(
                ("192.0.2.1", 9)
            )  # sends nothing; chooses the interface of the default route
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _from_rank_0(communicator: Any, told: bytes) -> bytes:
    length = bytearray(len(told).to_bytes(4, "little"))
    communicator.Bcast(length, root=0)
    buffer = bytearray(told.ljust(int.from_bytes(length, "little")))
    communicator.Bcast(buffer, root=0)
    return bytes(buffer)


def ranks_of_communicator(communicator: Any) -> tuple[int, ...] | None:
    """The processes of an mpi4py communicator by their numbers among all, in its order; None: all, in their order.

    Raises ValueError for a null communicator, and in processes that no mpirun has started."""
    if recognise(os.environ) is None:
        raise ValueError(
            "An MPI communicator stands for ranks only in processes that mpirun has started; give a list of ranks."
        )
    from mpi4py import MPI

    if communicator == MPI.COMM_NULL:
        raise ValueError("MPI.COMM_NULL: this process is in no communicator.")
    everyone = MPI.COMM_WORLD.Get_group()
    numbers = range(communicator.Get_size())
    ranks = tuple(MPI.Group.Translate_ranks(communicator.Get_group(), list(numbers), everyone))
    return None if ranks == tuple(range(everyone.Get_size())) else ranks
