"""Bootstrap over MPI, through mpi4py: rank 0 serves the store and broadcasts its address.

MPI does not encrypt what it sends. If ranks on several hosts all have the user's key (:mod:`.job_key`), they derive the
job's secret from this key and random bytes of rank 0. Otherwise rank 0 makes the secret and broadcasts it, which
protects the job only from attackers who cannot read MPI's traffic."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from typing import Any, Final

from horoplug.base.config import Config
from horoplug.base.variables import SECRET_BYTES
from horoplug.mpi import thread as mpi_thread
from horoplug.mpi.libraries import check_single_library
from horoplug.rendezvous.bootstrap.job_key import REMEDY, derive, key_file, user_key
from horoplug.rendezvous.bootstrap.launcher_environment import LaunchedProcess, recognise
from horoplug.rendezvous.network.addresses import loopback, own_address
from horoplug.rendezvous.network.host_token import HostToken
from horoplug.rendezvous.network.topology import host_key
from horoplug.rendezvous.store.server import StoreServer

# The key of a rank compared with that of rank 0: equal, missing, another one in the user's file, another one that the
# environment gives.
_SAME, _NONE, _OTHER, _GIVEN_OTHER = b"=-!x"
_log: Final = logging.getLogger("horoplug")

Rendezvous = tuple[tuple[str, int], bytes, StoreServer | None]
"""The store's address and port, the job's secret, and on rank 0 the server."""


def bootstrap_over_mpi(config: Config, launched: LaunchedProcess) -> Rendezvous:
    """Agree on a rendezvous over MPI. Collective over MPI's processes.

    Errors: ValueError with a one-line message if mpi4py or MPI cannot be used, or rank 0 cannot serve."""
    MPI = _load(launched)
    return mpi_thread.run(_agree, MPI, config, launched)


def _agree(MPI: Any, config: Config, launched: LaunchedProcess) -> Rendezvous:
    communicator = _world(MPI, launched)
    server, message = None, b""
    on_one_host = _are_on_one_host(communicator, config)
    secret = None if on_one_host else _secret_from_key(communicator, config)
    if communicator.rank == 0:
        server, message = _serve(config, on_one_host, secret)
    message = _broadcast(communicator, message)
    if message[:1] != b"+":
        raise ValueError(message[1:].decode())
    sent, where = message[1 : 1 + SECRET_BYTES], message[1 + SECRET_BYTES :].decode()
    address, port = where.split()
    return (address, int(port)), secret or sent, server


def _load(launched: LaunchedProcess) -> Any:
    """The module ``mpi4py.MPI``, with MPI initialised."""
    started = f"{launched.launcher.name} has started {launched.size} processes"
    if not mpi_thread.is_installed():
        raise ValueError(
            f"{started}, which find each other over MPI, and that needs mpi4py: pip install mpi4py, or start the job "
            "with horovodrun"
        )
    try:
        MPI = mpi_thread.load()
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{started}, but mpi4py cannot use an MPI library: {reason}. Set MPI4PY_LIBMPI to the libmpi.so of that "
            "mpirun, or start the job with horovodrun"
        ) from None
    check_single_library()
    mpi_thread.initialise(MPI)
    return MPI


def _world(MPI: Any, launched: LaunchedProcess) -> Any:
    """MPI's world communicator, after a check that it consists of the launched processes."""
    world = MPI.COMM_WORLD
    if (world.size, world.rank) != (launched.size, launched.rank):
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
        raise ValueError(
            f"{launched.launcher.name} has started {launched.size} processes, but for {library}, which mpi4py uses, "
            f"this is rank {world.rank} of {world.size}: start the job with the mpirun that belongs to it, or set "
            "MPI4PY_LIBMPI to the libmpi.so of the one you use"
        )
    return world


def _are_on_one_host(communicator: Any, config: Config) -> bool:
    job = bytearray(secrets.token_bytes(SECRET_BYTES))
    communicator.Bcast(job, root=0)
    with HostToken(bytes(job), "MPI", config.start_timeout) as token:
        own = hashlib.sha256(f"{host_key(config.hostname)}/{token.value}".encode()).digest()
        everyones = bytearray(len(own) * communicator.size)
        communicator.Allgather(own, everyones)
    return bool(everyones == own * communicator.size)


def _secret_from_key(communicator: Any, config: Config) -> bytes | None:
    """The job's secret, derived from the user's key, which does not leave the hosts. None if the ranks have no common
    key and the environment gives none. Collective.

    Errors: ValueError with a one-line message, on all ranks, if the environment of a rank gives a key that not all
    ranks have."""
    first = communicator.rank == 0
    key, message = None, b""
    if first:
        key = _own_key(config, may_create=True)
        salt = secrets.token_bytes(SECRET_BYTES)
        message = bytes([config.secret_key is not None]) + salt + _fingerprint(key, salt)
    message = _broadcast(communicator, message)
    if not first:  # only now: rank 0 may just have created the file
        key = _own_key(config, may_create=False)
    salt, expected = message[1 : 1 + SECRET_BYTES], message[1 + SECRET_BYTES :]
    if key is None:
        own = _NONE
    elif hmac.compare_digest(_fingerprint(key, salt), expected):
        own = _SAME
    else:
        own = _OTHER if config.secret_key is None else _GIVEN_OTHER
    found = bytearray(communicator.size)
    communicator.Allgather(bytes([own]), found)
    if key is not None and found == bytes([_SAME]) * communicator.size:
        return derive(key, f"MPI {salt.hex()}")
    if message[0] or _GIVEN_OTHER in found:
        differing = [rank for rank, each in enumerate(found) if each != _SAME]
        raise ValueError(
            f"the secret that the environment gives is not the same on all ranks: {_some(differing)} have another one "
            f"than rank 0, or none; {REMEDY}"
        )
    if first:
        _log.info(
            "the job's secret crosses the network over MPI, since %s do not have %s of rank 0; %s",
            _some([rank for rank, each in enumerate(found) if each != _SAME]),
            key_file(),
            REMEDY,
        )
    return None


def _own_key(config: Config, may_create: bool) -> bytes | None:
    """The key that the environment gives, else that of the user's file; None without one."""
    if config.secret_key is not None:
        return config.secret_key
    try:
        return user_key() if may_create or key_file().exists() else None
    except (OSError, RuntimeError, ValueError) as error:
        _log.info("the key of this user cannot be used: %s", error)
        return None


def _fingerprint(key: bytes | None, salt: bytes) -> bytes:
    """Equal on two ranks exactly if they have the same key; empty without one."""
    return b"" if key is None else hmac.digest(key, b"horoplug MPI key\0" + salt, "sha256")


def _some(ranks: list[int]) -> str:
    return f"ranks {ranks}" if len(ranks) <= 8 else f"{len(ranks)} ranks, the first {ranks[:8]},"


def _serve(
    config: Config, on_one_host: bool, secret: bytes | None
) -> tuple[StoreServer | None, bytes]:
    """Start the server on rank 0. Returns the server and the message for all ranks: "+", secret and address, or "-" and
    an error text. ``secret``: the secret that the ranks have derived, in whose place the message has zeros; None: make
    a new secret."""
    own = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
    try:
        address = loopback() if on_one_host else own_address(config.gloo_iface)
        server = StoreServer(own, address)
    except (OSError, ValueError) as error:
        return None, f"-rank 0 cannot serve the rendezvous: {error}".encode()
    sent = own if secret is None else bytes(SECRET_BYTES)
    return server, b"+" + sent + f"{server.address[0]} {server.address[1]}".encode()


def _broadcast(communicator: Any, message: bytes) -> bytes:
    """Rank 0's message, on every rank."""
    length = bytearray(len(message).to_bytes(4, "little"))
    communicator.Bcast(length, root=0)
    buffer = bytearray(message.ljust(int.from_bytes(length, "little")))
    communicator.Bcast(buffer, root=0)
    return bytes(buffer)


def ranks_of_communicator(communicator: Any) -> tuple[int, ...] | None:
    """The world ranks of an mpi4py communicator's processes, in its order; None if it has all ranks in world order.

    Errors: ValueError for a null communicator, and in a process that no MPI launcher has started."""
    launched = recognise(os.environ)
    if launched is None:
        raise ValueError(
            "An MPI communicator stands for ranks only in processes that mpirun has started; give a list of ranks"
        )
    MPI = mpi_thread.load()
    mpi_thread.initialise(MPI)
    return mpi_thread.run(_world_ranks, MPI, communicator, launched)


def _world_ranks(MPI: Any, communicator: Any, launched: LaunchedProcess) -> tuple[int, ...] | None:
    if communicator == MPI.COMM_NULL:
        raise ValueError("MPI.COMM_NULL: this process is in no communicator")
    if MPI.COMM_WORLD.Get_size() != launched.size:
        raise ValueError(
            f"MPI knows of {MPI.COMM_WORLD.Get_size()} of the {launched.size} processes that "
            f"{launched.launcher.name} has started; give a list of ranks, or start the job so that MPI knows all "
            "(srun --mpi=pmi2 or --mpi=pmix, or mpirun)"
        )
    everyone = MPI.COMM_WORLD.Get_group()
    numbers = range(communicator.Get_size())
    ranks = tuple(MPI.Group.Translate_ranks(communicator.Get_group(), list(numbers), everyone))
    return None if ranks == tuple(range(everyone.Get_size())) else ranks
