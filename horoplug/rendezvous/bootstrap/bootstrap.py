"""Bringing together the processes that another launcher than ``horovodrun`` has started.

They agree on a rendezvous: rank 0 serves the store, and every rank learns the store's address and the job's secret.
Ranks learn them over MPI (:mod:`.over_mpi`), or derive them from the launcher's variables (:mod:`.over_tcp`)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from horoplug.base.config import Config
from horoplug.rendezvous.bootstrap.launcher_environment import Launched, Place
from horoplug.rendezvous.store.server import StoreServer


class Meeting(NamedTuple):
    """What the processes have agreed on: their places, and where the rendezvous is."""

    rank: int
    size: int
    address: str
    port: int
    secret: bytes
    over_mpi: bool
    """How they have agreed."""

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


def place_to_meet(config: Config, launched: Launched) -> Place | None:
    """Where processes meet without MPI; None: over MPI."""
    return None if config.controller == "mpi" else launched.place


def meet(config: Config, launched: Launched) -> tuple[Meeting, StoreServer | None]:
    """Agree on a rendezvous; on rank 0 with its server, which is to be closed.

    Collective over the processes that were started. Errors, all of one line: ValueError if something about the
    environment is wrong, RendezvousError if rank 0 is not found within ``config.start_timeout``."""
    place = place_to_meet(config, launched)
    if place is None:
        from horoplug.rendezvous.bootstrap.over_mpi import meet_over_mpi

        address, secret, server = meet_over_mpi(config, launched)
    else:
        from horoplug.rendezvous.bootstrap.over_tcp import meet_at

        address, secret, server = meet_at(config, launched, place)
    return Meeting(launched.rank, launched.size, *address, secret, place is None), server
