"""Which ranks share a host, what follows from it, and which network a rank listens on."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence

from horoplug.rendezvous.network.interfaces import chosen


def host_key(name: str | None = None) -> str:
    """What ranks that can share memory have in common: the running kernel and the network namespace.

    (The namespace, because the sockets over which memory is shared live in it.) ``name``, if given, splits hosts
    further and never joins them: two machines that are both called "localhost" stay two."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            kernel = file.read().strip()
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        kernel, space = socket.gethostname(), ""
    return "/".join((kernel, space, name or ""))


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where all ranks are, and Horovod's local and cross numbers of one of them."""

    hosts: list[int]
    """Index of each rank's host; hosts are numbered in the order in which they appear."""
    local_rank: int
    """Number of this rank among those on its host."""
    local_size: int
    cross_rank: int
    """Number of this host among those that have this local rank."""
    cross_size: int
    is_homogeneous: bool
    """All hosts have the same number of ranks."""


def topology(rank: int, keys: Sequence[str]) -> Topology:
    """The topology as ``rank`` sees it, from the host keys of all ranks."""
    index: dict[str, int] = {}
    hosts = [index.setdefault(key, len(index)) for key in keys]
    counts = [hosts.count(host) for host in range(len(index))]
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


def interface_address(names: str) -> str:
    """The address of a network interface: IPv4 if it has one, else a global IPv6 one. ``names``: one name, or several
    separated by commas, of which the first that this host has counts.

    Errors: ValueError of one line if there is no such interface or it has no address."""
    try:
        return chosen([name.strip() for name in names.split(",") if name.strip()])[0].address
    except ValueError as error:
        raise ValueError(f"HOROVOD_GLOO_IFACE={names!r} is wrong: {error}") from None
