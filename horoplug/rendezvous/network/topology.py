"""Which ranks share a host, and the local and cross ranks that follow from it."""

from __future__ import annotations

import collections
import dataclasses
import os
import socket
from collections.abc import Hashable, Sequence


def host_key(name: str | None = None) -> str:
    """A text that is equal for ranks that can share memory: it names the running kernel and the network namespace.

    The namespace matters because ranks exchange the descriptors of shared memory over abstract Unix sockets, which
    belong to a network namespace. Clones of a virtual machine have the same text; :mod:`.host_token` tells them apart.
    ``name``, if given, only splits hosts further: two machines that are both called "localhost" stay two hosts."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            kernel = file.read().strip()
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        kernel, namespace = socket.gethostname(), ""
    return "/".join((kernel, namespace, name or ""))


@dataclasses.dataclass(frozen=True)
class Topology:
    """The hosts of all ranks, and Horovod's local and cross ranks of one of them."""

    hosts: list[int]
    """Host index of each rank; hosts are numbered in the order in which ranks mention them."""
    local_rank: int
    """Number of this rank among those on its host."""
    local_size: int
    cross_rank: int
    """Number of this host among the hosts that have a rank with this local rank."""
    cross_size: int
    is_homogeneous: bool
    """Whether all hosts have the same number of ranks."""


def topology(rank: int, keys: Sequence[Hashable]) -> Topology:
    """The topology as ``rank`` sees it, from the host keys of all ranks."""
    index: dict[Hashable, int] = {}
    hosts = [index.setdefault(key, len(index)) for key in keys]
    number = collections.Counter(hosts)
    counts = [number[host] for host in range(len(index))]
    local_rank = hosts[:rank].count(hosts[rank])
    cross = [host for host, count in enumerate(counts) if count > local_rank]
    return Topology(
        hosts=hosts,
        local_rank=local_rank,
        local_size=counts[hosts[rank]],
        cross_rank=cross.index(hosts[rank]),
        cross_size=len(cross),
        is_homogeneous=len(set(counts)) == 1,
    )
