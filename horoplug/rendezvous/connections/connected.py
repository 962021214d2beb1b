"""The connections of one rank, as the core gets them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from horoplug.base.link_speed import LinkSpeed
from horoplug.mpi.transport import MpiTransport
from horoplug.rendezvous.connections.on_demand import ConnectionService
from horoplug.rendezvous.network.libcrypto import libcrypto


@dataclasses.dataclass
class PeerConnections:
    """All connections of one rank, made and authenticated. Owns its descriptors until :meth:`release`."""

    rank: int
    size: int
    host: int
    """Index of this rank's host."""
    peers: list[tuple[int, int, int, int, int]]
    """(rank, host, stream_fd, segment_fd, doorbell_fd) of each other rank; the last two are -1 on other hosts. Streams
    are nonblocking, and -1 for a rank that is connected on demand."""
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
    """The descriptors of the connections beyond the first one, by rank on another host; -1 for a rank that is connected
    on demand."""
    speed: LinkSpeed | None = None
    """The speed of TCP messages between hosts, the same on all ranks (see measure.py); None if unknown."""
    mpi: MpiTransport | None = None
    """MPI, if it carries the data between hosts instead of the connections."""
    object_key: bytes = b""
    """The key that authenticates the objects of this generation, the same on all ranks; empty in a job of one rank."""
    keys: dict[int, bytes] = dataclasses.field(default_factory=dict, repr=False)
    """The encryption keys of all connections to a rank, by rank on another host, without those that are connected on
    demand; empty without encryption."""
    service: ConnectionService | None = None
    """Makes the connections to the other ranks on demand; None if all ranks are connected. It is not released: start it
    with the engine, and close it after the engine has shut down."""
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
        encrypted = self.keys or (self.service and self.service.encrypts)
        requests = {"connection_requests": self.service.take_request_fd()} if self.service else {}
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
            "libcrypto": libcrypto().addresses if encrypted else None,
            "keys": self.keys,
            **requests,
        }

    @property
    def streams(self) -> list[int]:
        """The descriptors of all connections that are made."""
        lanes = [fd for fds in self.lanes.values() for fd in fds]
        return [fd for fd in (*(peer[2] for peer in self.peers), *lanes) if fd >= 0]

    def close(self) -> None:
        """Close the service, and the descriptors unless they were released. Idempotent."""
        if self.service is not None:
            self.service.close()
        if self.owned:
            self.owned = False
            shared = [fd for peer in self.peers for fd in peer[3:]]
            for fd in (self.segment_fd, self.doorbell_fd, *shared, *self.streams):
                if fd >= 0:
                    os.close(fd)
