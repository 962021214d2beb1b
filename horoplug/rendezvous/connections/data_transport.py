"""Chooses TCP or MPI as the transport of data between hosts, by measuring both. All ranks make the same choice."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Any

from horoplug.base.errors import ProtocolError, RendezvousError
from horoplug.base.link_speed import LinkSpeed
from horoplug.mpi.measure import Costs, costs_from_json, is_faster
from horoplug.mpi.measure import agree as agree_on_mpi
from horoplug.mpi.transport import MpiTransport
from horoplug.rendezvous.connections.connector import Connector
from horoplug.rendezvous.connections.measure import Measurement, agree
from horoplug.rendezvous.connections.records import RankRecords, Record

_log = logging.getLogger("horoplug")


def choose_data_transport(
    records: RankRecords, connector: Connector, hosts: Sequence[int], mpi: MpiTransport | None
) -> tuple[LinkSpeed | None, MpiTransport | None]:
    """Measure the links between hosts and choose the transport. Collective over the job.

    ``hosts``: each rank's host index; there are at least two hosts. ``mpi``: MPI if data may go over it. Returns the
    speed of TCP, None if unknown, and ``mpi``, connected, if it is to carry the data, else None.

    Errors: ValueError if MPI was asked for and cannot carry data, ProtocolError if ranks ask for different transports,
    and those of :meth:`.RankRecords.collect`."""
    return _Choice(records, hosts, mpi).run(connector)


class _Choice:
    def __init__(
        self, records: RankRecords, hosts: Sequence[int], mpi: MpiTransport | None
    ) -> None:
        self.records = records
        self.rank = records.rank
        self.hosts = hosts
        self.mpi = mpi

    def run(self, connector: Connector) -> tuple[LinkSpeed | None, MpiTransport | None]:
        offer: Record = {"speed": self._measure_tcp(connector)}
        if self.mpi is not None:
            obstacle = self.mpi.obstacle()
            offer |= {"wanted": self.mpi.wanted, "obstacle": obstacle}
            if not obstacle:
                offer["costs"] = self.mpi.known_costs(self.hosts)
        table = self.records.share("speed", offer, _summary)
        tcp = None if table["tcp"] is None else LinkSpeed(*table["tcp"])
        return tcp, self._choose(table, tcp)

    def _neighbours(self) -> tuple[int | None, int | None]:
        """The next rank, to which this rank measures the link, and the previous rank, which measures the link to this
        rank; None for a neighbour on the same host."""
        size = len(self.hosts)
        near = ((self.rank + 1) % size, (self.rank - 1) % size)
        following, previous = (r if self.hosts[r] != self.hosts[self.rank] else None for r in near)
        return following, previous

    def _measure_tcp(self, connector: Connector) -> LinkSpeed | None:
        following, previous = self._neighbours()
        to = None if following is None else connector.stream(following)
        back = None if previous is None else connector.stream(previous)
        try:
            return Measurement(to, back).run(self.records.deadline)
        except TimeoutError:
            # A neighbour does not answer, which the store or the core reports with a better message. Close the
            # connections, so that the other neighbour does not wait for this rank, and continue, so that rank 0 does
            # not either.
            for sock in filter(None, (to, back)):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            return None

    def _choose(self, table: Record, tcp: LinkSpeed | None) -> MpiTransport | None:
        wanted = table["wanted"]
        self._check_alike(table)
        blocked, obstacle = table["blocked"]
        if wanted == "mpi" and obstacle:
            self._fail_together()
            raise ValueError(
                f"HOROVOD_CPU_OPERATIONS=mpi: MPI cannot carry data on rank {blocked}: {obstacle}; "
                "or unset the variable"
            )
        mpi = self.mpi
        if mpi is None or wanted == "gloo" or obstacle:
            if obstacle and wanted is None and mpi is not None and self.rank == 0:
                level = logging.WARNING if "thread level" in obstacle else logging.DEBUG
                _log.log(
                    level, "data between hosts goes over TCP: on rank %d, %s", blocked, obstacle
                )
            return None
        costs = self._agree_on_costs(mpi, table["costs"], tcp)
        chosen = wanted == "mpi" or is_faster(costs.speed, tcp)
        if self.rank == 0:
            _report(mpi, costs, tcp, chosen)
        if not chosen:
            mpi.close()
            return None
        return mpi

    def _check_alike(self, table: Record) -> None:
        if table["differs"] is not None:
            other, theirs = table["differs"]
            self._fail_together()
            raise ProtocolError(
                f"data between hosts is to go over {theirs or 'whatever is faster'} on rank {other}, "
                f"but over {table['wanted'] or 'whatever is faster'} on rank 0; set HOROVOD_CPU_OPERATIONS alike on "
                "every rank"
            )

    def _agree_on_costs(
        self, mpi: MpiTransport, known: Sequence[Any] | None, tcp: LinkSpeed | None
    ) -> Costs:
        """The costs of MPI: ``known``, those of an earlier generation, if all ranks know the same ones; otherwise they
        are measured. Connects MPI if it has to be measured or carries the data."""
        costs = costs_from_json(known) if known else None
        if costs is None or mpi.wanted == "mpi" or is_faster(costs.speed, tcp):
            mpi.connect(self.records.deadline)
        if costs is None:
            own = mpi.measure(*self._neighbours(), self.records.deadline)
            agreed = self.records.share("mpi", {"costs": own}, _agreed_costs)
            costs = costs_from_json(agreed["costs"])
        mpi.use_costs(self.hosts, costs)
        return costs

    def _fail_together(self) -> None:
        """Wait until every rank is about to raise the same error. Rank 0 waits for all, because the store may end with
        it."""
        self.records.publish("failed", {})
        if self.rank == 0:
            with contextlib.suppress(RendezvousError):
                self.records.collect("failed", range(1, len(self.hosts)))


def _summary(offers: dict[int, Record]) -> Record:
    """The table that rank 0 makes of the records of all ranks.

    ``tcp``: the agreed speed of TCP; ``wanted``: the transport that rank 0 requests; ``differs``: the first rank that
    requests another one, and which; ``blocked``: the first rank on which MPI cannot carry data, and why; ``costs``: the
    costs of MPI, if all ranks know the same ones."""
    ordered = sorted(offers.items())
    wanted = offers[0].get("wanted")
    known = {costs_from_json(costs) for offer in offers.values() if (costs := offer.get("costs"))}
    everyone = all(offer.get("costs") for offer in offers.values())
    return {
        "tcp": agree([offer.get("speed") for offer in offers.values()]),
        "wanted": wanted,
        "differs": next(
            ([r, offer.get("wanted")] for r, offer in ordered if offer.get("wanted") != wanted),
            None,
        ),
        "blocked": next(
            ([r, text] for r, offer in ordered if (text := offer.get("obstacle"))), [0, ""]
        ),
        "costs": next(iter(known)) if everyone and len(known) == 1 else None,
    }


def _agreed_costs(records: dict[int, Record]) -> Record:
    costs = agree_on_mpi([record.get("costs") for record in records.values()])
    assert costs is not None  # with several hosts, at least two neighbours are on different hosts
    return {"costs": costs}


def _report(mpi: MpiTransport, costs: Costs, tcp: LinkSpeed | None, chosen: bool) -> None:
    """Log the choice and the speeds behind it."""

    def show(speed: LinkSpeed) -> str:
        return f"{speed.latency * 1e6:.1f} us and {speed.bandwidth / 1e9:.2f} GB/s"

    _log.info(
        "data between hosts goes over %s: %s (thread level %s) %s, its allreduce %.1f us; TCP %s",
        "MPI" if chosen else "TCP",
        mpi.library,
        mpi.level,
        show(costs.speed),
        costs.collectives[0][0] * 1e6,
        show(tcp) if tcp else "unknown",
    )
    if chosen and mpi.funneled:
        _log.log(
            logging.INFO if mpi.initialised_here else logging.WARNING,
            "MPI thread level '%s': calls go through one thread; the program must not call MPI itself while the job "
            "runs",
            mpi.level,
        )
