"""Connects every rank with every other rank, or in a large job with its neighbours on other hosts and all ranks of its
host, and hands the connections to the core as open descriptors.

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
5. In a large job on several hosts, every rank keeps its TCP listener, and makes the other connections when the core
   first needs them (on_demand.py).
6. If there are several hosts, ranks measure the links between them, over TCP and, where MPI could carry the data, over
   MPI, and agree on the faster transport (data_transport.py).

While a rank connects, it keeps a get of the keys of step 4 pending, so that it learns at once which rank has died or
given up. All keys begin with the generation (how often the job has initialised), so that keys of different generations
differ."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Sequence

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
from horoplug.base.processors import own_processors
from horoplug.mpi.transport import MpiTransport
from horoplug.rendezvous.connections.connected import PeerConnections as PeerConnections
from horoplug.rendezvous.connections.connector import Connector
from horoplug.rendezvous.connections.data_transport import choose_data_transport
from horoplug.rendezvous.connections.host_hub import HUB_DESCRIPTORS, Hub, HubLoop, Member
from horoplug.rendezvous.connections.neighbours import neighbours
from horoplug.rendezvous.connections.on_demand import ConnectionService
from horoplug.rendezvous.connections.peer_connection import Identity
from horoplug.rendezvous.connections.records import Barrier, RankRecords, Record
from horoplug.rendezvous.connections.sockets import Address, tcp_listener, unix_listener
from horoplug.rendezvous.connections.tables import table_of_addresses, table_of_ranks
from horoplug.rendezvous.network.host_token import HostToken
from horoplug.rendezvous.network.interfaces import interface_address
from horoplug.rendezvous.network.topology import host_key, topology
from horoplug.rendezvous.store.client import StoreClient

_NONCE_BYTES = 32

_log = logging.getLogger("horoplug")


def connect_peers(
    *,
    rank: int,
    size: int,
    store: StoreClient | None,
    secret: bytes | None,
    generation: int = 0,
    launched: Sequence[int] | None = None,
    scope: str | None = None,
    key: str | None = None,
    timeout: float = 30.0,
    timeout_set_by: str | None = None,
    data_timeout: float = 30.0,
    interface: str | None = None,
    streams: int = 1,
    mpi: MpiTransport | None = None,
    encrypt: bool = False,
    connect_all: int = 64,
) -> PeerConnections:
    """Connect this rank with the others, within ``timeout`` seconds. Collective over the job.

    ``generation``: how often the job has initialised before, the same on all ranks. ``launched``: by rank, the number
    that the process was launched with, if only some of the launched processes form the job. ``scope``: the beginning
    of all keys, by default made from ``launched``. ``key``: the host key, by default :func:`host_key`.
    ``timeout_set_by``: what sets ``timeout``, for messages, None: variables. ``data_timeout``: seconds after which
    the kernel gives up a TCP connection whose peer does not acknowledge. ``interface``: name of the network interface
    to listen on. ``streams``: connections to each rank on another host, the same on all ranks. ``mpi``: MPI, if data
    may go over it. ``encrypt``: whether the connections between hosts are encrypted, the same on all ranks.
    ``connect_all``: the number of ranks up to which a job connects every two ranks; a larger one connects only ranks
    of one host and neighbours, the same on all ranks. A job of one rank needs neither store nor secret, and opens
    nothing.

    Errors: MissingRanksError names the ranks that did not come; PeerLostError the rank that ended or gave up;
    RankTakenError if another process has this rank; AuthenticationError; ProtocolError if the ranks disagree about the
    job; ValueError for an unknown interface. After an error nothing stays open."""
    key = host_key() if key is None else key
    if size == 1:
        alone = topology(0, [key])
        return PeerConnections(
            rank, size, host=0, peers=[], segment_fd=-1, doorbell_fd=-1, **vars(alone)
        )
    if store is None or secret is None:
        raise ValueError(f"a job of {size} ranks needs a rendezvous server and a secret")
    numbers = list(range(size)) if launched is None else list(launched)
    store.register(numbers[rank])
    part = scope
    if part is None:
        part = "" if launched is None else "-".join(map(str, numbers)) + ":"
    if rank == 0 and generation >= 2:
        # All ranks took part in the previous generation, so that no rank needs the keys of the one before it.
        store.delete(f"{part}{generation - 2}/")
    prefix = f"{part}{generation}/"
    records = RankRecords(
        store, prefix, rank, numbers, timeout, timeout_set_by, has_all=launched is None
    )
    me = Identity(rank, size, generation, secret, encrypt)
    builder = _PeerConnector(records, me, data_timeout, streams, connect_all)
    try:
        return builder.build(key, interface, mpi)
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

    def __init__(
        self,
        records: RankRecords,
        me: Identity,
        data_timeout: float,
        streams: int,
        connect_all: int,
    ) -> None:
        self.records = records
        self.me = me
        self.data_timeout = data_timeout
        self.streams = streams
        self.connect_all = connect_all
        self.rank, self.size = me.rank, me.size
        self.connector = Connector(me, records.deadline)
        self.own_fds: list[int] = []
        self.through_hub: dict[int, tuple[int, int, int]] = {}

    def build(self, key: str, interface: str | None, mpi: MpiTransport | None) -> PeerConnections:
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
        object_key = self._object_key(table)
        where = topology(self.rank, table["hosts"])
        host = table["by_host"][where.hosts[self.rank]]
        local = {r for r in others if where.hosts[r] == where.hosts[self.rank]}
        remote = [r for r in others if r not in local]
        first = set(remote)  # the ranks on other hosts that are connected now
        # The same on all ranks: one whose every peer is a neighbour has a service, too.
        on_demand = bool(remote) and self.size > self.connect_all
        if on_demand:
            first &= neighbours(self.rank, where.hosts)
        hub = min(self.rank, *local) if local else self.rank
        addresses: dict[int, Address] = {
            r: str(host["unix"]) for r in (local if hub == self.rank else [hub])
        }
        self._check_limit(len(local), len(first), len(remote))
        listening = self._exchange_tcp(interface, remote) if remote else {}
        later = {r: listening[r] for r in remote if r not in first}
        addresses |= {r: listening[r] for r in sorted(first)}
        if local:
            self._create_shared_memory()
        self.connector.connect_to(addresses, local, self.streams)
        self._connect(hub, local, on_demand)
        speed = chosen = None
        if remote:
            speed, chosen = choose_data_transport(self.records, self.connector, where.hosts, mpi)
        keys = {r: self.connector.data_keys(r) for r in first} if self.me.encrypt else {}
        service = self._service(later) if on_demand else None
        connections = self.connector.detach()
        through_hub, self.through_hub = self.through_hub, {}
        streams_of = {r: connections[r, 0] for r in addresses} | through_hub
        absent = (-1, -1, -1)
        peers = [(r, where.hosts[r], *streams_of.get(r, absent)) for r in others]
        lanes = {
            r: [connections.get((r, i), absent)[0] for i in range(1, self.streams)] for r in remote
        }
        segment, doorbell = self.own_fds or (-1, -1)
        self.own_fds = []
        return PeerConnections(
            self.rank,
            self.size,
            host=where.hosts[self.rank],
            peers=peers,
            segment_fd=segment,
            doorbell_fd=doorbell,
            **vars(where),
            lanes=lanes,
            speed=speed,
            mpi=chosen,
            object_key=object_key,
            keys=keys,
            service=service,
            processors=frozenset(cpu for a, b in host["processors"] for cpu in range(a, b + 1)),
            quota=float(host["quota"]),
        )

    def _service(self, addresses: dict[int, Address]) -> ConnectionService:
        """The service that connects to the ranks that listen at these addresses, on demand."""
        listener = self.connector.take_listener()
        return ConnectionService(listener, self.me, addresses, self.streams, self.data_timeout)

    def _object_key(self, table: Record) -> bytes:
        """The key that authenticates objects. ``table``: the table of the ranks that rank 0 has made."""
        nonce = str(table.get("nonce", "")).encode()
        if len(nonce) != 2 * _NONCE_BYTES:
            raise ProtocolError("rank 0 has published something unreadable")
        data = b"horoplug objects\0" + nonce + self.records.prefix.encode()
        return hmac.new(self.me.secret, data, hashlib.sha256).digest()

    def _check_limit(self, local: int, first: int, remote: int) -> None:
        """Raise RendezvousError if this process may not open as many files as it has connections.

        ``local``: ranks on this host; ``first``: those on other hosts that are connected now; ``remote``: all ranks on
        other hosts."""
        fixed = 3 * local + HUB_DESCRIPTORS + len(os.listdir("/proc/self/fd"))
        for ranks in (first, remote):
            needed = fixed + self.streams * ranks
            if needed <= descriptors.limit():
                continue
            text = (
                f"rank {self.rank} needs about {needed} open files for its connections to {local + ranks} ranks, but "
                f"{descriptors.too_low()}"
            )
            if ranks == first:
                raise RendezvousError(text)
            _log.info("%s", text)

    def _exchange_tcp(self, interface: str | None, remote: list[int]) -> dict[int, Address]:
        """Listen on TCP, and return the addresses of the ranks on other hosts."""
        address = interface_address(interface) if interface else self.records.store.local_address
        listener = tcp_listener(address, self.size * self.streams)
        self.connector.listen(listener, self.data_timeout)
        port = listener.getsockname()[1]
        record = {
            "address": address,
            "port": port,
            "streams": self.streams,
            "connect_all": self.connect_all,
        }
        table = self.records.share("tcp", record, table_of_addresses, self._check_connections)
        known, of, ports = table["addresses"], table["of"], table["ports"]
        return {r: (str(known[of[r]]), int(ports[r])) for r in remote}

    def _check_connections(self, records: dict[int, Record]) -> None:
        for r, tcp in sorted(records.items()):
            if tcp.get("streams") != self.streams:
                raise ProtocolError(
                    f"rank {r} wants {tcp.get('streams')} connections between hosts, rank {self.rank} "
                    f"{self.streams}; set HOROPLUG_NUM_STREAMS alike on every rank"
                )
            if tcp.get("connect_all") != self.connect_all:
                raise ProtocolError(
                    f"rank {r} connects every two ranks in jobs of up to {tcp.get('connect_all')} ranks, rank "
                    f"{self.rank} in those of up to {self.connect_all}; set HOROPLUG_CONNECT_ALL alike on every rank"
                )

    def _create_shared_memory(self) -> None:
        """Create the descriptors for the peers on this host: an empty memfd and an eventfd."""
        self.own_fds.append(_new_memfd(f"horoplug-{self.rank}"))
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

    def _connect(self, hub: int, local: set[int], keep_listener: bool) -> None:
        """Connect to the hub of this host and to other hosts, then to the other ranks of this host through the hub, and
        wait until all ranks have done so. A lost rank is an error at once.

        ``keep_listener``: leave the TCP listener open. No rank connects to it before all have done so."""
        deadline = self.records.deadline
        try:
            with Barrier(self.records, "up") as barrier:
                while not self.connector.done:
                    barrier.check()
                    self._check_deadline(deadline, self.connector.missing)
                    self.connector.run_once(self.records.store)
                self.connector.stop_listening(keep_listener)
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


def _new_memfd(name: str) -> int:
    """An empty memfd, which the core seals when it has its size. Errors: RendezvousError."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        why = "this Python has none" if isinstance(error, AttributeError) else error.strerror
        raise RendezvousError(
            f"the ranks of a host share memory by memfd_create, which is not possible here ({why}): it needs Linux "
            "3.17, a Python that was built for it, and in a container a seccomp profile that allows it"
        ) from None
