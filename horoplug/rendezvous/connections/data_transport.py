"""Chooses what carries the data between hosts, TCP or MPI, by measuring both. All ranks come to the same choice."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

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
        own = self._measure_tcp(connector)
        offers = self._exchange_offers(own)
        tcp = agree([offer.get("speed") for offer in offers.values()])
        return tcp, self._choose(offers, tcp)

    def _neighbours(self) -> tuple[int | None, int | None]:
        """The next rank, to which this rank measures the link, and the previous one, which measures the link to this
        one; None for a neighbour on the same host."""
        size = len(self.hosts)
        near = ((self.rank + 1) % size, (self.rank - 1) % size)
        following, previous = (r if self.hosts[r] != self.hosts[self.rank] else None for r in near)
        return following, previous

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.hosts)) if rank != self.rank]

    def _measure_tcp(self, connector: Connector) -> LinkSpeed | None:
        following, previous = self._neighbours()
        to = None if following is None else connector.stream(following)
        back = None if previous is None else connector.stream(previous)
        # If a connection breaks, its rank has ended: the store or the core reports that with a better message.
        with contextlib.suppress(OSError):
            return Measurement(to, back).run(self.records.deadline)
        return None

    def _exchange_offers(self, tcp: LinkSpeed | None) -> dict[int, Record]:
        """Each rank's TCP measurement, and whether MPI can carry data there."""
        offer: Record = {"speed": tcp}
        if self.mpi is not None:
            obstacle = self.mpi.obstacle()
            offer |= {"wanted": self.mpi.wanted, "obstacle": obstacle}
            if not obstacle:
                offer["costs"] = self.mpi.known_costs(self.hosts)
        self.records.publish("speed", offer)
        offers = self.records.collect("speed", self._others())
        offers[self.rank] = offer
        return offers

    def _choose(self, offers: dict[int, Record], tcp: LinkSpeed | None) -> MpiTransport | None:
        wanted = offers[0].get("wanted")
        obstacles = {r: offer.get("obstacle", "") for r, offer in sorted(offers.items())}
        blocked, obstacle = next(((r, text) for r, text in obstacles.items() if text), (0, ""))
        self._check_alike(offers, wanted)
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
        costs = self._agree_on_costs(mpi, offers, tcp)
        chosen = wanted == "mpi" or is_faster(costs.speed, tcp)
        if self.rank == 0:
            _report(mpi, costs, tcp, chosen)
        if not chosen:
            mpi.close()
            return None
        return mpi

    def _check_alike(self, offers: dict[int, Record], wanted: str | None) -> None:
        for other, offer in sorted(offers.items()):
            if offer.get("wanted") != wanted:
                self._fail_together()
                raise ProtocolError(
                    f"data between hosts is to go over {offer.get('wanted') or 'whatever is faster'} on rank {other}, "
                    f"but over {wanted or 'whatever is faster'} on rank 0; set HOROVOD_CPU_OPERATIONS alike on every "
                    "rank"
                )

    def _agree_on_costs(
        self, mpi: MpiTransport, offers: dict[int, Record], tcp: LinkSpeed | None
    ) -> Costs:
        """MPI's costs: those of an earlier generation if all ranks know the same, else newly measured ones.

        Connects MPI if it needs to be measured, or carries the data."""
        known = {
            costs_from_json(offer["costs"]) if offer["costs"] else None for offer in offers.values()
        }
        costs = next(iter(known)) if len(known) == 1 else None
        if costs is None or mpi.wanted == "mpi" or is_faster(costs.speed, tcp):
            mpi.connect(self.records.deadline)
        if costs is None:
            own = mpi.measure(*self._neighbours(), self.records.deadline)
            self.records.publish("mpi", {"costs": own})
            found = self.records.collect("mpi", self._others())
            costs = agree_on_mpi([own, *(record.get("costs") for record in found.values())])
            assert costs is not None  # with several hosts, some neighbours are on different ones
        mpi.use_costs(self.hosts, costs)
        return costs

    def _fail_together(self) -> None:
        """Wait until every rank is about to raise the same error. Rank 0 leaves last: the store may end with it."""
        self.records.publish("failed", {})
        if self.rank == 0:
            with contextlib.suppress(RendezvousError):
                self.records.collect("failed", self._others())


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
