"""Meeting over MPI, which mpi4py opens: rank 0 serves the store and tells the others its address and a new secret."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from typing import Any

from horoplug.base.config import SECRET_BYTES, Config
from horoplug.mpi.thread import initialise, load, run
from horoplug.rendezvous.bootstrap.launcher_environment import Launched, recognise
from horoplug.rendezvous.network.addresses import own_address
from horoplug.rendezvous.network.topology import host_key
from horoplug.rendezvous.store.server import StoreServer

_LIBRARY = re.compile(r"libmpi(ch)?(_abi|_mt|_ilp64)?\.so[.\d]*")  # Debian's MPICH: libmpich


def meet_over_mpi(
    config: Config, launched: Launched
) -> tuple[tuple[str, int], bytes, StoreServer | None]:
    """The rendezvous's address and secret; on rank 0 also its server.

    Collective over the processes of the MPI. Raises ValueError of one line if they cannot meet."""
    MPI = _load(launched)
    return run(_meet, MPI, config, launched)


def _meet(
    MPI: Any, config: Config, launched: Launched
) -> tuple[tuple[str, int], bytes, StoreServer | None]:
    communicator = _world(MPI, launched)
    server, told = None, b""
    alone = _are_on_one_host(communicator, config)
    if communicator.rank == 0:
        server, told = _serve(config, alone)
    told = _from_rank_0(communicator, told)
    if told[:1] != b"+":
        raise ValueError(told[1:].decode())
    secret, place = told[1 : 1 + SECRET_BYTES], told[1 + SECRET_BYTES :].decode()
    address, port = place.split()
    return (address, int(port)), secret, server


def _load(launched: Launched) -> Any:
    """mpi4py's module MPI, and MPI initialised."""
    started = f"{launched.launcher.name} has started {launched.size} processes"
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{started}, which find each other over MPI, and that needs mpi4py: pip install mpi4py, or start the job "
            "with horovodrun."
        ) from None
    try:
        MPI = load()
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{started}, but mpi4py cannot use an MPI library: {reason}. Set MPI4PY_LIBMPI to the libmpi.so of that "
            "mpirun, or start the job with horovodrun."
        ) from None
    _check_libraries()
    initialise(MPI)
    return MPI


def _world(MPI: Any, launched: Launched) -> Any:
    """MPI's communicator of all processes that the launcher has started."""
    world = MPI.COMM_WORLD
    if (world.size, world.rank) != (launched.size, launched.rank):
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
        raise ValueError(
            f"{launched.launcher.name} has started {launched.size} processes, but for {library}, which mpi4py uses, "
            f"this is rank {world.rank} of {world.size}: start the job with the mpirun that belongs to it, or set "
            "MPI4PY_LIBMPI to the libmpi.so of the one you use."
        )
    return world


def _check_libraries() -> None:
    """Whether there is only one MPI in this process: two of them take each other's functions."""
    found = loaded_libraries()
    # One MPI may come in several files, which lie beside each other; Debian has those of all MPIs in one folder.
    if len({(os.path.dirname(path), "libmpich." in path) for path in found}) > 1:
        raise ValueError(
            f"two MPI libraries are loaded in this process, {' and '.join(found)}: they disturb each other. Set "
            "MPI4PY_LIBMPI to the one that the program uses otherwise."
        )


def loaded_libraries() -> list[str]:
    """The files of the MPI libraries that this process has opened."""
    found: dict[str, None] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")[2]
            if path and _LIBRARY.fullmatch(os.path.basename(path)):
                found["/" + path] = None
    return list(found)


def _are_on_one_host(communicator: Any, config: Config) -> bool:
    own = hashlib.sha256(host_key(config.hostname).encode()).digest()
    everyones = bytearray(len(own) * communicator.size)
    communicator.Allgather(own, everyones)
    return everyones == own * communicator.size


def _serve(config: Config, alone: bool) -> tuple[StoreServer | None, bytes]:
    """A server on rank 0, and what the others need to know of it, or what they are to raise."""
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        address = "127.0.0.1" if alone else own_address(config.gloo_iface)
        server = StoreServer(secret, address)
    except (OSError, ValueError) as error:
        return None, f"-rank 0 cannot serve the rendezvous: {error}".encode()
    return server, b"+" + secret + f"{server.address[0]} {server.address[1]}".encode()


def _from_rank_0(communicator: Any, told: bytes) -> bytes:
    length = bytearray(len(told).to_bytes(4, "little"))
    communicator.Bcast(length, root=0)
    buffer = bytearray(told.ljust(int.from_bytes(length, "little")))
    communicator.Bcast(buffer, root=0)
    return bytes(buffer)


def ranks_of_communicator(communicator: Any) -> tuple[int, ...] | None:
    """The processes of an mpi4py communicator by their numbers among all, in its order; None: all, in their order.

    Raises ValueError for a null communicator, and in processes that no mpirun has started."""
    launched = recognise(os.environ)
    if launched is None:
        raise ValueError(
            "An MPI communicator stands for ranks only in processes that mpirun has started; give a list of ranks."
        )
    MPI = load()
    initialise(MPI)
    return run(_places, MPI, communicator, launched)


def _places(MPI: Any, communicator: Any, launched: Launched) -> tuple[int, ...] | None:
    if communicator == MPI.COMM_NULL:
        raise ValueError("MPI.COMM_NULL: this process is in no communicator.")
    if MPI.COMM_WORLD.Get_size() != launched.size:
        raise ValueError(
            f"MPI knows of {MPI.COMM_WORLD.Get_size()} of the {launched.size} processes that "
            f"{launched.launcher.name} has started; give a list of ranks, or start the job so that MPI knows all "
            "(srun --mpi=pmi2 or --mpi=pmix, or mpirun)."
        )
    everyone = MPI.COMM_WORLD.Get_group()
    numbers = range(communicator.Get_size())
    ranks = tuple(MPI.Group.Translate_ranks(communicator.Get_group(), list(numbers), everyone))
    return None if ranks == tuple(range(everyone.Get_size())) else ranks
