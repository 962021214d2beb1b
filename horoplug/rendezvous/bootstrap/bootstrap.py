"""Lets the processes that another launcher than ``horovodrun`` has started agree on a rendezvous.

Rank 0 serves the store; every rank learns the store's address and the job's secret. Ranks learn them over MPI
(:mod:`.over_mpi`), or derive them from the launcher's variables (:mod:`.over_tcp`)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from horoplug.base.config import Config
from horoplug.rendezvous.bootstrap.launcher_environment import BootstrapAddress, LaunchedProcess
from horoplug.rendezvous.bootstrap.over_mpi import bootstrap_over_mpi
from horoplug.rendezvous.bootstrap.over_tcp import bootstrap_over_tcp
from horoplug.rendezvous.store.server import StoreServer


class BootstrapResult(NamedTuple):
    """This process's rank, and the rendezvous that all processes have agreed on."""

    rank: int
    size: int
    address: str
    port: int
    secret: bytes
    over_mpi: bool
    """Whether the processes have agreed over MPI."""

    def apply(self, config: Config) -> Config:
        """The configuration with this process's rank and the rendezvous."""
        return dataclasses.replace(
            config,
            rank=self.rank,
            size=self.size,
            rendezvous_addr=self.address,
            rendezvous_port=self.port,
            rendezvous_server="launcher",
            secret_key=self.secret,
        )


def tcp_bootstrap_address(config: Config, launched: LaunchedProcess) -> BootstrapAddress | None:
    """Where the processes find rank 0 if they bootstrap over TCP; None if they bootstrap over MPI."""
    return None if config.controller == "mpi" else launched.bootstrap_address


def bootstrap(
    config: Config, launched: LaunchedProcess
) -> tuple[BootstrapResult, StoreServer | None]:
    """Agree on a rendezvous. On rank 0, also returns its server, which the caller has to close.

    Collective over the launched processes. Errors, each of one line: ValueError if the environment is invalid,
    RendezvousError if rank 0 is not found within ``config.start_timeout`` seconds."""
    where = tcp_bootstrap_address(config, launched)
    if where is None:
        address, secret, server = bootstrap_over_mpi(config, launched)
    else:
        address, secret, server = bootstrap_over_tcp(config, launched, where)
    result = BootstrapResult(launched.rank, launched.size, *address, secret, where is None)
    return result, server
