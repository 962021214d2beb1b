"""Connects every rank with every other rank and hands the connections to the core as open descriptors.

1. Every rank publishes a record in the store (version, size, host key, name of its Unix listener) and waits for the
   table that rank 0 makes of all records. The table also has fresh random bytes. From these and the job's secret, every
   rank derives the key that authenticates objects (horoplug/common/object_tags.py).
2. If the ranks are on several hosts, every rank opens a TCP listener and publishes its address, and the number of
   connections that it wants to each rank on another host.
3. Rank j connects to every i < j: over an abstract Unix socket on the same host (it leaves nothing in the file system,
   and carries each side's memfd and eventfd), over that many TCP connections otherwise. Both ends authenticate before
   anything else (peer_connection.py).
4. A rank that has all its connections publishes that in the store, and waits until all ranks have: either every rank
   succeeds or none does.
5. If there are several hosts, ranks measure the links between them, over TCP and, where MPI could carry the data, over
   MPI, and agree on the faster transport (data_transport.py).

While a rank connects, it keeps a get of the keys of step 4 pending, so that it learns at once which rank has died or
given up. All keys begin with the generation (how often the job has initialised), so that keys of different generations
differ."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from horoplug._native import version
from horoplug.base import cgroup, descriptors
from horoplug.base.errors import (
    AuthenticationError,
    PeerLostError,
    ProtocolError,
    RankTakenError,
    RendezvousError,
    StoreTimeoutError,
)
from horoplug.base.link_speed import LinkSpeed
from horoplug.base.processors import own_processors
from horoplug.mpi.transport import MpiTransport
from horoplug.rendezvous.connections.connector import Connector, tcp_listener, unix_listener
from horoplug.rendezvous.connections.data_transport import choose_data_transport
from horoplug.rendezvous.connections.host_hub import HUB_DESCRIPTORS, Hub, HubLoop, Member
from horoplug.rendezvous.connections.peer_connection import Identity
from horoplug.rendezvous.connections.records import Barrier, RankRecords, Record
from horoplug.rendezvous.connections.tables import table_of_addresses, table_of_ranks
from horoplug.rendezvous.network.host_token import HostToken
from horoplug.rendezvous.network.interfaces import interface_address
from horoplug.rendezvous.network.libcrypto import libcrypto
from horoplug.rendezvous.network.topology import Topology, host_key, topology
from horoplug.rendezvous.store.client import StoreClient

_NONCE_BYTES = 32

Address = tuple[str, int] | str
"""Where a rank listens: host and port, or on this host the name of its Unix socket."""


@dataclasses.dataclass
class PeerConnections:
    """All connections of one rank, made and authenticated. Owns its descriptors until :meth:`release`."""

    rank: int
    size: int
    host: int
    """Index of this rank's host."""
    peers: list[tuple[int, int, int, int, int]]
    """(rank, host, stream_fd, segment_fd, doorbell_fd) of each other rank; the last two are -1 on other hosts. Streams
    are nonblocking."""
    segment_fd: int
    """This rank's memfd, empty; -1 if no peer is on this host."""
    doorbell_fd: int
    """This rank's eventfd; -1 if no peer is on this host."""
    hosts: list[int]
    """Host index of every rank."""
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    lanes: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """The descriptors of the connections beyond the first one, by rank on another host."""
    speed: LinkSpeed | None = None
    """The speed of TCP messages between hosts, the same on all ranks (see measure.py); None if unknown."""
    mpi: MpiTransport | None = None
    """MPI, if it carries the data between hosts instead of the connections."""
    object_key: bytes = b""
    """The key that authenticates the objects of this generation, the same on all ranks; empty in a job of one rank."""
    keys: dict[int, bytes] = dataclasses.field(default_factory=dict, repr=False)
    """The encryption keys of all connections to a rank, by rank on another host; empty without encryption."""
    processors: frozenset[int] = frozenset()
    """The processors that the ranks of this host may use together."""
    quota: float = 0.0
    """CPU time per second that these ranks may use together (1.5: one and a half processors); 0: no limit."""
    owned: bool = True

    def release(self) -> dict[str, Any]:
        """The arguments of ``_native.Engine`` that describe the connections. The engine owns the descriptors from then
        on."""
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
            "link_latency": speed.latency if speed else 0.0,
            "link_bandwidth": speed.bandwidth if speed else 0.0,
            "mpi": self.mpi.description() if self.mpi else None,
            "processor_quota": self.quota,
            "libcrypto": libcrypto().addresses if self.keys else None,
            "keys": self.keys,
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
    launched: Sequence[int] | None = None,
    key: str | None = None,
    timeout: float = 30.0,
    data_timeout: float = 30.0,
    interface: str | None = None,
    streams: int = 1,
    mpi: MpiTransport | None = None,
    encrypt: bool = False,
) -> PeerConnections:
    """Connect this rank with all others, within ``timeout`` seconds. Collective over the job.

    ``generation``: how often the job has initialised before, the same on all ranks. ``launched``: by rank, the number
    that the process was launched with, if only some of the launched processes form the job. ``key``: the host key, by
    default :func:`host_key`. ``data_timeout``: seconds after which the kernel gives up a TCP connection whose peer does
    not acknowledge. ``interface``: name of the network interface to listen on. ``streams``: connections to each rank on
    another host, the same on all ranks. ``mpi``: MPI, if data may go over it. ``encrypt``: whether the connections
    between hosts are encrypted, the same on all ranks. A job of one rank needs neither store nor secret, and opens
    nothing.

    Errors: MissingRanksError names the ranks that did not come; PeerLostError the rank that ended or gave up;
    RankTakenError if another process has this rank; AuthenticationError; ProtocolError if the ranks disagree about the
    job; ValueError for an unknown interface. After an error nothing stays open."""
    key = host_key() if key is None else key
    if size == 1:
        return _assemble(rank, size, topology(0, [key]), [], (-1, -1))
    if store is None or secret is None:
        raise ValueError(f"a job of {size} ranks needs a rendezvous server and a secret")
    numbers = list(range(size)) if launched is None else list(launched)
    store.register(numbers[rank])
    part = "" if launched is None else "-".join(map(str, numbers)) + ":"
    if rank == 0 and generation >= 2:
        # All ranks took part in the previous generation, so that no rank needs the keys of the one before it.
        store.delete(f"{part}{generation - 2}/")
    records = RankRecords(store, f"{part}{generation}/", rank, numbers, timeout)
    builder = _PeerConnector(records, Identity(rank, size, generation, secret, encrypt))
    try:
        return builder.build(key, data_timeout, interface, streams, mpi)
    except BaseException as error:
        explained = _explained(error)
        builder.give_up(explained)
        if explained is error:
            raise
        raise explained from None
    finally:
        builder.close()


def _explained(error: BaseException) -> BaseException:
    """The error to raise instead of ``error``. For a lack of descriptors, it names the limit."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return RendezvousError(descriptors.reason(error))
    return error


class _PeerConnector:
    """One call of :func:`connect_peers`."""

    def __init__(self, records: RankRecords, me: Identity) -> None:
        self.records = records
        self.me = me
        self.rank, self.size = me.rank, me.size
        self.connector = Connector(me, records.deadline)
        self.own_fds: list[int] = []
        self.through_hub: dict[int, tuple[int, int, int]] = {}

    def build(
        self,
        key: str,
        data_timeout: float,
        interface: str | None,
        streams: int,
        mpi: MpiTransport | None,
    ) -> PeerConnections:
        others = [r for r in range(self.size) if r != self.rank]
        name, listener = unix_listener(self.size)
        self.connector.listen(listener)
        with HostToken(self.me.secret, self.records.prefix, self.records.remaining) as token:
            record: Record = {
                "version": version(),
                "size": self.size,
                "host": f"{key}/{token.value}",
                "unix": name,
                "processors": sorted(own_processors()),
                "quotas": cgroup.limits(),
                "encrypt": self.me.encrypt,
            }
            if self.rank == 0:
                record["nonce"] = secrets.token_hex(_NONCE_BYTES)
            table = self.records.share("rank", record, table_of_ranks, self._check_alike)
        where = topology(self.rank, table["hosts"])
        host = table["by_host"][where.hosts[self.rank]]
        local = {r for r in others if where.hosts[r] == where.hosts[self.rank]}
        remote = [r for r in others if r not in local]
        hub = min(self.rank, *local) if local else self.rank
        addresses: dict[int, Address] = {
            r: str(host["unix"]) for r in (local if hub == self.rank else [hub])
        }
        self._check_limit(len(local), len(remote) * streams)
        if remote:
            addresses |= self._exchange_tcp(interface, remote, data_timeout, streams)
        if local:
            self._create_shared_memory()
        self.connector.connect_to(addresses, local, streams)
        self._connect(hub, local)
        speed = chosen = None
        if remote:
            speed, chosen = choose_data_transport(self.records, self.connector, where.hosts, mpi)
        keys = {r: self.connector.data_keys(r) for r in remote} if self.me.encrypt else {}
        connections = self.connector.detach()
        through_hub, self.through_hub = self.through_hub, {}
        streams_of = {r: connections[r, 0] for r in addresses} | through_hub
        peers = [(r, where.hosts[r], *streams_of[r]) for r in others]
        lanes = {r: [connections[r, i][0] for i in range(1, streams)] for r in remote}
        segment, doorbell = self.own_fds or (-1, -1)
        self.own_fds = []
        made = _assemble(
            self.rank,
            self.size,
            where,
            peers,
            (segment, doorbell),
            lanes,
            speed,
            chosen,
            self._object_key(table),
        )
        made.keys = keys
        made.processors = frozenset(cpu for a, b in host["processors"] for cpu in range(a, b + 1))
        made.quota = float(host["quota"])
        return made

    def _object_key(self, table: Record) -> bytes:
        """The key that authenticates objects. ``table``: the table of the ranks that rank 0 has made."""
        nonce = str(table.get("nonce", "")).encode()
        if len(nonce) != 2 * _NONCE_BYTES:
            raise ProtocolError("rank 0 has published something unreadable")
        data = b"horoplug objects\0" + nonce + self.records.prefix.encode()
        return hmac.new(self.me.secret, data, hashlib.sha256).digest()

    def _check_limit(self, local: int, remote: int) -> None:
        """Raise RendezvousError if this process may not open as many files as it has connections.

        ``local``: ranks on this host; ``remote``: connections to other hosts."""
        needed = 3 * local + remote + HUB_DESCRIPTORS + len(os.listdir("/proc/self/fd"))
        if needed > descriptors.limit():
            raise RendezvousError(
                f"rank {self.rank} needs about {needed} open files for its connections to {self.size - 1} ranks, but "
                f"{descriptors.too_low()}"
            )

    def _exchange_tcp(
        self, interface: str | None, remote: list[int], data_timeout: float, streams: int
    ) -> dict[int, Address]:
        """Listen on TCP, and return the addresses of the ranks on other hosts."""
        address = interface_address(interface) if interface else self.records.store.local_address
        listener = tcp_listener(address, self.size * streams)
        self.connector.listen(listener, data_timeout)
        port = listener.getsockname()[1]

        def check(records: dict[int, Record]) -> None:
            for r, tcp in sorted(records.items()):
                if tcp.get("streams") != streams:
                    raise ProtocolError(
                        f"rank {r} wants {tcp.get('streams')} connections between hosts, rank {self.rank} "
                        f"{streams}; set HOROPLUG_NUM_STREAMS alike on every rank"
                    )

        record = {"address": address, "port": port, "streams": streams}
        table = self.records.share("tcp", record, table_of_addresses, check)
        known, of, ports = table["addresses"], table["of"], table["ports"]
        return {r: (str(known[of[r]]), int(ports[r])) for r in remote}

    def _create_shared_memory(self) -> None:
        """Create the descriptors for the peers on this host: an empty memfd and an eventfd."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING  # the core seals it when it has its size
        self.own_fds.append(os.memfd_create(f"horoplug-{self.rank}", flags))
        self.own_fds.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.me.fds = (self.own_fds[0], self.own_fds[1])

    def _check_alike(self, records: dict[int, Record]) -> None:
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
            if bool(record.get("encrypt")) != self.me.encrypt:
                encrypts, plain = (self.rank, r) if self.me.encrypt else (r, self.rank)
                raise ProtocolError(
                    f"rank {encrypts} encrypts what goes to other hosts, rank {plain} does not; set HOROPLUG_ENCRYPT "
                    "alike on every rank"
                )

    def _connect(self, hub: int, local: set[int]) -> None:
        """Connect to the hub of this host and to other hosts, then to the other ranks of this host through the hub, and
        wait until all ranks have done so. A lost rank is an error at once."""
        deadline = self.records.deadline
        try:
            with Barrier(self.records, "up") as barrier:
                while not self.connector.done:
                    barrier.check()
                    self._check_deadline(deadline, self.connector.missing)
                    self.connector.run_once(self.records.store)
                self.connector.stop_listening()
                if len(local) > 1:
                    self._run_hub(hub, local, barrier)
                barrier.arrive()
                barrier.wait()
        except StoreTimeoutError:
            raise self._overdue(self.connector.missing or self.records.absent("up")) from None

    def _run_hub(self, hub: int, local: set[int], barrier: Barrier) -> None:
        """Connect this rank with those of its host that are not the hub, or as the hub, all of them."""
        connections = self.connector.local_connections()
        endpoint: Hub | Member
        deadline = self.records.deadline
        if hub == self.rank:
            endpoint = Hub(connections)
        else:
            endpoint = Member(hub, connections[hub], local - {hub})
            # The hub gives up first, because it knows which rank is missing.
            deadline += Barrier.GRACE / 2
        with contextlib.closing(endpoint), HubLoop(endpoint, deadline) as loop:
            while not endpoint.done:
                barrier.check()
                self._check_deadline(deadline, endpoint.awaited)
                try:
                    loop.run_once(self.records.store)
                except PeerLostError:
                    barrier.check()  # if the rank gave up, it has told the store why
                    raise
            if isinstance(endpoint, Member):
                self.through_hub, endpoint.received = endpoint.received, {}

    def _check_deadline(self, deadline: float, awaited: list[int]) -> None:
        if time.monotonic() > deadline:
            raise self._overdue(awaited)

    def _overdue(self, ranks: list[int]) -> RendezvousError:
        """The error at the deadline, if these ranks are not connected. It names ranks that have refused this one."""
        missing, rejections = self.records.missing(ranks), self.connector.rejections
        if not rejections:
            return missing
        return AuthenticationError(f"{missing}: {'; '.join(map(str, rejections.values()))}")

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up, and which rank has caused that, if this rank has published a
        record.

        This is also necessary if a rank was lost: a rank that has everything it needs from the lost one may be waiting
        for this rank only."""
        if not self.records.published or isinstance(error, RankTakenError):
            return
        culprit, reason = self.records.launched[self.rank], str(error)
        if isinstance(error, PeerLostError):
            culprit = error.rank
        else:
            text = reason if isinstance(error, (RendezvousError, OSError)) else repr(error)
            reason = f"rank {culprit} gave up: {text}"
        # If the store is gone, the others find out by themselves.
        with contextlib.suppress(RendezvousError, OSError):
            self.records.store.abort(self.records.prefix, culprit, reason)

    def close(self) -> None:
        self.connector.close()
        for fds in (self.own_fds, *self.through_hub.values()):
            for fd in fds:
                os.close(fd)
        self.own_fds, self.through_hub = [], {}


def _assemble(
    rank: int,
    size: int,
    where: Topology,
    peers: list[tuple[int, int, int, int, int]],
    own: tuple[int, int],
    lanes: dict[int, list[int]] | None = None,
    speed: LinkSpeed | None = None,
    mpi: MpiTransport | None = None,
    object_key: bytes = b"",
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
        object_key=object_key,
    )
