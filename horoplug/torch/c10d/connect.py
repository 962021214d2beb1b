"""Connects the ranks of a process group of ``torch.distributed`` and starts their engine.

The store of PyTorch carries one entry: where rank 0 of the group serves horoplug's own store, and a random name for the
job. The ranks derive the job's secret from that name and from the user's key, which never passes through PyTorch's
store. All connections are authenticated with this secret. PyTorch's store is not used after the start."""

from __future__ import annotations

import dataclasses
import secrets
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from horoplug._native import Engine, Error, Status
from horoplug.base import log
from horoplug.base.config import Config
from horoplug.base.errors import RendezvousError
from horoplug.common.engine_start import start_engine
from horoplug.rendezvous.bootstrap.job_key import job_secret
from horoplug.rendezvous.connections.connected import PeerConnections
from horoplug.rendezvous.connections.records import missing_ranks
from horoplug.rendezvous.session import Rendezvous
from horoplug.rendezvous.store.server import StoreServer
from horoplug.torch.c10d.reconfigure import STORE_ERRORS, host_for_others

_KEY = "horoplug"
_LIMITS_SET_BY = "the argument timeout of init_process_group or new_group sets"
_PROBE_SECONDS = 2.0
_RETRY_SECONDS = 0.02
_SERVE_AFTER_FAILURE_SECONDS = 5.0  # at most


class Connected(NamedTuple):
    """A started engine and what belongs to it."""

    engine: Engine
    connections: PeerConnections
    direct_calls: bool
    """Whether calls may go to the core without Python."""


class Limits(NamedTuple):
    """Limits of an engine in seconds; 0: never."""

    operation: float
    transfer: float
    """Without progress."""


def limits_of(timeout: timedelta) -> Limits:
    """The limits of a group with the argument ``timeout``. Raises ValueError for invalid variables."""
    operation, transfer = max(timeout.total_seconds(), 0.0), Config.from_env().data_timeout
    return Limits(operation, min(transfer, operation or transfer))


def connect(
    store: Any, rank: int, size: int, timeout: timedelta, limit: timedelta | None = None
) -> Connected:
    """Connect the ``size`` ranks of a group and start the engine. Collective over the group.

    ``store``: a store of PyTorch of which no other group uses the keys. ``timeout``: limit for every operation.
    ``limit``: that for the start, None: the same. Errors, each of one line: RendezvousError, AuthenticationError,
    ValueError for variables that are invalid or differ between the ranks, DistBackendError if a rank ends."""
    limit = limit or timeout
    limits = limits_of(timeout)
    config = dataclasses.replace(
        Config.from_env(),
        rank=rank,
        size=size,
        start_timeout=limit.total_seconds(),
        start_timeout_set_by=_LIMITS_SET_BY,
        operation_timeout=limits.operation,
        data_timeout=limits.transfer,
        rendezvous_server="launcher",
        elastic_process=None,
        cpu_operations=None,
    )
    log.configure(config.log_level, hide_time=config.log_hide_time, rank=rank)
    server = None
    if size > 1:
        config, server = _rendezvous(config, store, limit)
    rendezvous = Rendezvous(config, server)
    try:
        connected = _start(config, rendezvous)
    except BaseException as error:
        # The other ranks may still have to read in the store of rank 0 why this rank has given up.
        rendezvous.close(
            patience=_SERVE_AFTER_FAILURE_SECONDS if isinstance(error, Exception) else 0.0
        )
        raise
    # Every rank has started its engine, so no rank needs the store any more.
    rendezvous.close()
    return connected


def _start(config: Config, rendezvous: Rendezvous) -> Connected:
    connections = rendezvous.connect(0)
    try:
        engine = start_engine(
            config,
            connections,
            (),
            # A rank may leave while others still send, as the last stage of a pipeline does, and as with Gloo.
            transfers_outlive_ranks=True,
            operation_limit_set_by=_LIMITS_SET_BY,
            restart="create the process group again",
        )
    except Error as error:
        connections.close()
        status, text = error.args
        kind = ValueError if status == Status.MISMATCH else dist.DistBackendError
        raise kind(text) from None
    if connections.service is not None:
        connections.service.start(engine)
    return Connected(engine, connections, config.direct_calls)


def _rendezvous(
    config: Config, store: Any, timeout: timedelta
) -> tuple[Config, StoreServer | None]:
    """The configuration with the address and the secret of horoplug's store; rank 0 also gets its server."""
    server = None
    if config.rank == 0:
        job = secrets.token_hex(16)
        secret = job_secret(config.secret_key, f"c10d {job}")
        server = StoreServer(secret, host_for_others())
        address, port = server.address
        try:
            _call(store.set, _KEY, f"{job} {port} {address}")
        except RendezvousError:
            server.close()
            raise
    else:
        job, port, address = _find_server(store, config.rank, timeout)
        secret = job_secret(config.secret_key, f"c10d {job}")
    named = dataclasses.replace(
        config, rendezvous_addr=address, rendezvous_port=port, secret_key=secret
    )
    return named, server


def _find_server(store: Any, rank: int, timeout: timedelta) -> tuple[str, int, str]:
    """The name of the job, and the port and address of rank 0's server.

    torchrun keeps PyTorch's store when it starts the ranks again, so the entry may be that of a rank 0 which has ended.
    An entry whose server does not answer is read again until rank 0 has replaced it."""
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        _call(store.wait, [_KEY], timeout)  # the store itself may have a longer time limit
    except RendezvousError:
        _call(store.add, f"{_KEY}/late", 1)  # if the store answers, it is rank 0 that is missing
        raise missing_ranks([0], rank, timeout.total_seconds(), _LIMITS_SET_BY) from None
    while True:
        found = _call(store.get, _KEY).decode(errors="replace").split(" ", 2)
        if len(found) != 3 or not found[1].isdecimal():
            raise RendezvousError(
                "rank 0 of the process group has another version of horoplug, or its backend is not horoplug"
            )
        job, port, address = found[0], int(found[1]), found[2]
        try:
            socket.create_connection((address, port), _PROBE_SECONDS).close()
        except OSError:
            if time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
                continue
        return job, port, address  # after the deadline, the error is that of the rendezvous


def _call(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except STORE_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise RendezvousError(
            f"the store of torch.distributed does not answer, so the ranks cannot find each other: {reason}"
        ) from None
