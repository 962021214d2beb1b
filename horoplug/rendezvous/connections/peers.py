"""Connects every rank with every other and hands the connections over as open descriptors.

1. Every rank publishes a *record* in the store (version, size, host key, name of its Unix listener) and waits for all
   others'.
2. Only if they are not all on one host, every rank opens a TCP listener and publishes its address, and how many
   connections it wants to each rank on another host.
3. Rank j connects to every i < j: by an abstract Unix socket on the same host (nothing in the file system; it carries
   each side's memfd and eventfd), by that many TCP connections otherwise. Both ends
   authenticate before anything else (links.py).
4. A rank that has all its connections says so in the store and waits until all have: success is everyone's.
5. If there are several hosts, ranks measure what messages between them cost (measure.py), and agree on it; and if MPI
   could carry them, what they cost there (mpi_measure.py), unless all know that, and whether it shall (mpi.py).

While it connects, a rank keeps a get of the others' step 4 pending, so that a rank that dies or gives up is reported
at once and by number. All keys begin with the generation (how often the job has initialised), so that nothing of an
earlier round is taken for this one's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from horoplug._native import version
from horoplug.base.errors import (
    MissingRanksError,
    PeerLostError,
    ProtocolError,
    RankTakenError,
    RendezvousError,
    StoreTimeoutError,
)
from horoplug.mpi.measure import Costs, is_faster, parsed
from horoplug.mpi.measure import agree as agree_on_mpi
from horoplug.mpi.transport import Carrier
from horoplug.rendezvous.connections.connector import Connector, tcp_listener, unix_listener
from horoplug.rendezvous.connections.measure import Measurement, Speed, agree
from horoplug.rendezvous.connections.peer_connection import Identity
from horoplug.rendezvous.network.topology import Topology, host_key, interface_address, topology
from horoplug.rendezvous.store.client import StoreClient

_log = logging.getLogger("horoplug")


@dataclasses.dataclass
class PeerConnections:
    """All connections of one rank, made and authenticated. Owns its descriptors until :meth:`release`."""

    rank: int
    size: int
    host: int
    """Index of this rank's host."""
    peers: list[tuple[int, int, int, int, int]]
    """(rank, host, stream_fd, segment_fd, doorbell_fd) of each other rank; the last two -1 on other hosts. Streams do
    not block (O_NONBLOCK)."""
    segment_fd: int
    """This rank's memfd, empty; -1 if no peer is on this host."""
    doorbell_fd: int
    """This rank's eventfd; -1 likewise."""
    hosts: list[int]
    """Host index of every rank."""
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    lanes: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """By rank on another host: the descriptors of the connections beyond the first."""
    speed: Speed | None = None
    """Of messages between hosts, the same on all ranks (see measure.py); None: unknown."""
    mpi: Carrier | None = None
    """What carries the data between hosts instead of the connections."""
    owned: bool = True

    def release(self) -> dict[str, Any]:
        """The arguments of ``_native.Engine`` that describe the mesh; the descriptors are the engine's from now on."""
        self.owned = False
        costs = self.mpi.costs if self.mpi else None
        speed = costs.speed if costs else self.speed
        return {
            "rank": self.rank,
            "size": self.size,
            "host": self.host,
            "peers": self.peers,
            "segment_fd": self.segment_fd,
            "doorbell_fd": self.doorbell_fd,
            "lanes": self.lanes,
            "link_latency": speed[0] if speed else 0.0,
            "link_bandwidth": speed[1] if speed else 0.0,
            "mpi": self.mpi.description() if self.mpi else None,
        }

    @property
    def streams(self) -> list[int]:
        """The descriptors of all connections."""
        return [peer[2] for peer in self.peers] + [fd for fds in self.lanes.values() for fd in fds]

    def close(self) -> None:
        """Close the descriptors, unless they were released. Idempotent."""
        if self.owned:
            self.owned = False
            shared = [fd for peer in self.peers for fd in peer[3:]]
            for fd in (self.segment_fd, self.doorbell_fd, *shared, *self.streams):
                if fd >= 0:
                    os.close(fd)


def connect_peers(
    *,
    rank: int,
    size: int,
    store: StoreClient | None,
    secret: bytes | None,
    generation: int = 0,
    started_as: Sequence[int] | None = None,
    key: str | None = None,
    timeout: float = 30.0,
    data_timeout: float = 30.0,
    interface: str | None = None,
    streams: int = 1,
    carrier: Carrier | None = None,
) -> PeerConnections:
    """Connect this rank with all others, within ``timeout`` seconds.

    ``generation``: how often the job has initialised before, the same on all ranks. ``started_as``: by rank, the number
    that the process was started with, if the job is but a part of what was started. ``key``: the host key, by default
    :func:`host_key`. ``data_timeout``: seconds after which the kernel gives up a TCP connection whose peer does not
    acknowledge. ``interface``: name of the network interface to listen on. ``streams``: connections to each rank on
    another host, the same on all ranks. ``carrier``: MPI, if data may go over it. A job of one rank needs neither store
    nor secret, and opens nothing.

    Errors: MissingRanksError names ranks that did not come; PeerLostError a rank that ended or gave up; RankTakenError
    if another process has this rank; AuthenticationError; ProtocolError if the ranks disagree about the job; ValueError
    for an unknown interface. Nothing stays open."""
    key = host_key() if key is None else key
    if size == 1:
        return _assemble(rank, size, topology(0, [key]), [], (-1, -1))
    if store is None or secret is None:
        raise ValueError(f"a job of {size} ranks needs a rendezvous server and a secret")
    numbers = list(range(size)) if started_as is None else list(started_as)
    store.register(numbers[rank])
    part = "" if started_as is None else "-".join(map(str, numbers)) + ":"
    if rank == 0 and generation >= 2:
        # Everyone was connected to this rank in the generation before, so the one before that is over for all.
        store.delete(f"{part}{generation - 2}/")
    builder = _Builder(rank, numbers, store, secret, part, generation, timeout)
    try:
        return builder.build(key, data_timeout, interface, streams, carrier)
    except BaseException as error:
        builder.give_up(error)
        raise
    finally:
        builder.close()


class _Builder:
    def __init__(
        self,
        rank: int,
        numbers: list[int],
        store: StoreClient,
        secret: bytes,
        part: str,
        generation: int,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = size = len(numbers)
        self.numbers = numbers  # by rank: what the store knows it as
        self.store = store
        self.prefix = f"{part}{generation}/"
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.me = Identity(rank, size, generation, secret)
        self.connector = Connector(self.me, self.deadline)
        self.own_fds: list[int] = []
        self.published = False

    def build(
        self,
        key: str,
        data_timeout: float,
        interface: str | None,
        streams: int,
        carrier: Carrier | None,
    ) -> PeerConnections:
        others = [r for r in range(self.size) if r != self.rank]
        name, listener = unix_listener(self.size)
        self.connector.listen(listener)
        record = {"version": version(), "size": self.size, "host": key, "unix": name}
        self._publish("rank", record)
        records = self._collect("rank", others)
        records[self.rank] = record
        self._check_alike(records)
        where = topology(self.rank, [str(records[r]["host"]) for r in range(self.size)])
        local = {r for r in others if where.hosts[r] == where.hosts[self.rank]}
        addresses: dict[int, tuple[str, int] | str] = {r: str(records[r]["unix"]) for r in local}
        if len(local) < len(others):
            addresses |= self._exchange_tcp(interface, others, local, data_timeout, streams)
        if local:
            self._make_shared()
        self.connector.expect(addresses, local, streams)
        self._connect(others)
        speed = mpi = None
        if len(local) < len(others):
            speed, offers = self._measure(where.hosts, carrier)
            mpi = self._choose(where.hosts, carrier, offers, speed)
        links = self.connector.detach()
        peers = [(r, where.hosts[r], *links[r, 0]) for r in others]
        lanes = {r: [links[r, i][0] for i in range(1, streams)] for r in others if r not in local}
        segment, doorbell = self.own_fds or (-1, -1)
        self.own_fds = []
        return _assemble(self.rank, self.size, where, peers, (segment, doorbell), lanes, speed, mpi)

    def _exchange_tcp(
        self,
        interface: str | None,
        others: list[int],
        local: set[int],
        data_timeout: float,
        streams: int,
    ) -> dict[int, tuple[str, int] | str]:
        """Listen on TCP, and learn where the ranks on other hosts do."""
        address = interface_address(interface) if interface else self.store.local_address
        listener = tcp_listener(address, self.size * streams)
        self.connector.listen(listener, data_timeout)
        self._publish(
            "tcp", {"address": address, "port": listener.getsockname()[1], "streams": streams}
        )
        found = self._collect("tcp", [r for r in others if r not in local])
        for r, tcp in sorted(found.items()):
            if tcp.get("streams") != streams:
                raise ProtocolError(
                    f"rank {r} wants {tcp.get('streams')} connections between hosts, rank {self.rank} "
                    f"{streams}; set HOROPLUG_NUM_STREAMS alike on every rank"
                )
        return {r: (str(tcp["address"]), int(tcp["port"])) for r, tcp in found.items()}

    def _make_shared(self) -> None:
        """Create what peers on this host are given: an empty memfd and an eventfd."""
        self.own_fds.append(os.memfd_create(f"horoplug-{self.rank}", os.MFD_CLOEXEC))
        self.own_fds.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.me.fds = (self.own_fds[0], self.own_fds[1])

    # ---- the store ---------------------------------------------------------------------------------------------------

    def _publish(self, kind: str, record: dict[str, Any]) -> None:
        key = f"{self.prefix}{kind}/{self.rank}"
        if not self.store.claim(key, json.dumps(record).encode()):
            raise RankTakenError(
                f"rank {self.rank} of this job is already taken by another process"
            )
        self.published = True

    def _collect(self, kind: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
        keys = [f"{self.prefix}{kind}/{r}" for r in ranks]
        try:
            numbers = [self.numbers[r] for r in ranks]
            values = self.store.get(keys, max(self.deadline - time.monotonic(), 0), numbers)
        except StoreTimeoutError as error:
            raise self._missing([ranks[i] for i in error.missing]) from None
        return {r: _parse(r, value) for r, value in zip(ranks, values, strict=True)}

    def _missing(self, ranks: list[int]) -> MissingRanksError:
        missing = [self.numbers[r] for r in ranks]
        which = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        return MissingRanksError(
            missing,
            f"{which} did not connect within {self.timeout:g} s (rank {self.numbers[self.rank]} has waited; "
            "HOROVOD_START_TIMEOUT and HOROVOD_GLOO_TIMEOUT_SECONDS set how long)",
        )

    def _check_alike(self, records: dict[int, dict[str, Any]]) -> None:
        for r, record in sorted(records.items()):
            if record.get("version") != version():
                raise ProtocolError(
                    f"rank {r} has horoplug {record.get('version', '(an older one)')}, rank {self.rank} "
                    f"{version()}; install the same one on every host"
                )
            if record.get("size") != self.size:
                raise ProtocolError(
                    f"rank {r} was started with a size of {record.get('size')}, "
                    f"rank {self.rank} with {self.size}"
                )

    def _measure(
        self, hosts: list[int], carrier: Carrier | None
    ) -> tuple[Speed | None, dict[int, dict[str, Any]]]:
        """What links between hosts cost, as all ranks together have measured it (None: unknown), and what each rank
        says of MPI."""
        following, previous = self._neighbours(hosts)

        def stream(r: int | None) -> socket.socket | None:
            return None if r is None else self.connector.stream(r)

        speed = None
        # If a connection broke, its rank is gone, which the store will say; or the core will find out.
        with contextlib.suppress(OSError):
            speed = Measurement(stream(following), stream(previous)).run(self.deadline)
        record: dict[str, Any] = {"speed": speed}
        if carrier is not None:
            obstacle = carrier.obstacle()
            record |= {"wanted": carrier.wanted, "obstacle": obstacle}
            if not obstacle:
                record["costs"] = carrier.known(hosts)
        self._publish("speed", record)
        found = self._collect("speed", [r for r in range(self.size) if r != self.rank])
        found[self.rank] = record
        return agree([record.get("speed") for record in found.values()]), found

    def _neighbours(self, hosts: list[int]) -> tuple[int | None, int | None]:
        """The rank to which this one measures the way, and the one that measures it to this one; None: same host."""
        near = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        following, previous = (r if hosts[r] != hosts[self.rank] else None for r in near)
        return following, previous

    def _choose(
        self,
        hosts: list[int],
        carrier: Carrier | None,
        offers: dict[int, dict[str, Any]],
        tcp: Speed | None,
    ) -> Carrier | None:
        """MPI, connected, if it is to carry the data between hosts; all ranks come to the same.

        Errors: ValueError if it was asked for and cannot."""
        wanted = offers[0].get("wanted")
        obstacles = {r: offer.get("obstacle", "") for r, offer in sorted(offers.items())}
        r, obstacle = next(((r, text) for r, text in obstacles.items() if text), (0, ""))
        for other, offer in sorted(offers.items()):
            if offer.get("wanted") != wanted:
                self._let_all_know()
                raise ProtocolError(
                    f"data between hosts is to go over {offer.get('wanted') or 'whatever is faster'} on rank {other}, "
                    f"but over {wanted or 'whatever is faster'} on rank 0; set HOROVOD_CPU_OPERATIONS alike on every "
                    "rank"
                )
        if wanted == "mpi" and obstacle:
            self._let_all_know()
            raise ValueError(
                f"HOROVOD_CPU_OPERATIONS=mpi: MPI cannot carry data on rank {r}: {obstacle}; or unset the variable"
            )
        if carrier is None or wanted == "gloo" or obstacle:
            if obstacle and wanted is None and carrier is not None and self.rank == 0:
                level = logging.WARNING if "thread level" in obstacle else logging.DEBUG
                _log.log(level, "data between hosts goes over TCP: on rank %d, %s", r, obstacle)
            return None
        known = {parsed(offer["costs"]) if offer["costs"] else None for offer in offers.values()}
        costs = next(iter(known)) if len(known) == 1 else None
        if costs is None or wanted == "mpi" or is_faster(costs.speed, tcp):
            carrier.connect(self.deadline)
        if costs is None:
            costs = self._measure_mpi(hosts, carrier)
        carrier.agreed(hosts, costs)
        chosen = wanted == "mpi" or is_faster(costs.speed, tcp)
        if self.rank == 0:
            _log.info("%s", _explain(carrier, tcp, chosen))
            if chosen and carrier.funneled:
                level = logging.INFO if carrier.initialised_here else logging.WARNING
                _log.log(
                    level,
                    "MPI thread level '%s': calls go through one thread; the program must not call MPI itself while "
                    "the job runs",
                    carrier.level,
                )
        if not chosen:
            carrier.close()
            return None
        return carrier

    def _measure_mpi(self, hosts: list[int], carrier: Carrier) -> Costs:
        own = carrier.measure(*self._neighbours(hosts), self.deadline)
        self._publish("mpi", {"costs": own})
        found = self._collect("mpi", [r for r in range(self.size) if r != self.rank])
        costs = agree_on_mpi([own, *(record.get("costs") for record in found.values())])
        assert costs is not None  # there are several hosts, and ranks next to each other
        return costs

    def _let_all_know(self) -> None:
        """All ranks fail for the same reason. Rank 0 is the last one, since the store may end with it."""
        self._publish("failed", {})
        if self.rank == 0:
            with contextlib.suppress(RendezvousError):
                self._collect("failed", list(range(1, self.size)))

    # ---- connecting --------------------------------------------------------------------------------------------------

    def _connect(self, others: list[int]) -> None:
        """Run the connector until it is done, then wait for everyone; a lost rank is reported at once."""
        remaining = max(self.deadline - time.monotonic(), 0)
        numbers = [self.numbers[r] for r in others]
        everyone = self.store.begin_get(
            [f"{self.prefix}up/{r}" for r in others], remaining, numbers
        )
        try:
            announced = all_up = False
            while not (announced and all_up):
                if not announced and self.connector.done:
                    announced = True
                    self.connector.stop_listening()
                    self.store.set(f"{self.prefix}up/{self.rank}", b"")
                all_up = all_up or self.store.poll_get(everyone) is not None
                if not (announced and all_up):
                    if time.monotonic() > self.deadline + 1.0:
                        raise self._missing(self.connector.missing or others)
                    self.connector.turn(self.store)
        except StoreTimeoutError as error:
            raise self._missing(
                self.connector.missing or [others[i] for i in error.missing]
            ) from None
        finally:
            self.store.abandon(everyone)

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank will not make it, and because of whom, unless they never heard of it.

        Not even a lost rank is known to all: who has all that it needs of that one may wait for this one alone."""
        if not self.published or isinstance(error, RankTakenError):
            return
        culprit, reason = self.numbers[self.rank], str(error)
        if isinstance(error, PeerLostError):
            culprit = error.rank
        else:
            text = reason if isinstance(error, (RendezvousError, OSError)) else repr(error)
            reason = f"rank {culprit} gave up: {text}"
        with contextlib.suppress(
            RendezvousError, OSError
        ):  # else they will notice in their own time
            self.store.abort(self.prefix, culprit, reason)

    def close(self) -> None:
        self.connector.close()
        for fd in self.own_fds:
            os.close(fd)
        self.own_fds = []


def _explain(carrier: Carrier, tcp: Speed | None, chosen: bool) -> str:
    def show(speed: Speed) -> str:
        return f"{speed[0] * 1e6:.1f} us and {speed[1] / 1e9:.2f} GB/s"

    assert carrier.costs is not None
    return (
        f"data between hosts goes over {'MPI' if chosen else 'TCP'}: {carrier.library} (thread level {carrier.level}) "
        f"{show(carrier.costs.speed)}, its allreduce {carrier.costs.own[0][0] * 1e6:.1f} us; "
        f"TCP {show(tcp) if tcp else 'unknown'}"
    )


def _parse(rank: int, value: bytes) -> dict[str, Any]:
    try:
        record = json.loads(value)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ProtocolError(f"rank {rank} has published something unreadable")
    return record


def _assemble(
    rank: int,
    size: int,
    where: Topology,
    peers: list[tuple[int, int, int, int, int]],
    own: tuple[int, int],
    lanes: dict[int, list[int]] | None = None,
    speed: Speed | None = None,
    mpi: Carrier | None = None,
) -> PeerConnections:
    return PeerConnections(
        rank=rank,
        size=size,
        host=where.hosts[rank],
        peers=peers,
        segment_fd=own[0],
        doorbell_fd=own[1],
        hosts=where.hosts,
        local_rank=where.local_rank,
        local_size=where.local_size,
        cross_rank=where.cross_rank,
        cross_size=where.cross_size,
        is_homogeneous=where.is_homogeneous,
        lanes=lanes or {},
        speed=speed,
        mpi=mpi,
    )
