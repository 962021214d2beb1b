"""Which ranks on other hosts a rank of a large job connects to in ``init()``: O(log h) ones in a job on h hosts.

They are the partners of the algorithms whose partners do not depend on the data: rings, Bruck's algorithm, recursive
doubling and halving, binomial trees, and the tree of negotiation (csrc/controller/state/topology.h). Connections to
other ranks are made on demand (on_demand.py).

Two ranks are neighbours of each other or not at all. The ring of all ranks, in which each rank has the previous and the
next one as neighbours or shares a host with them, keeps the graph connected without any one rank."""

from __future__ import annotations

from collections.abc import Sequence

_RADIX = 8  # kRadix in csrc/controller/state/topology.h


def neighbours(rank: int, hosts: Sequence[int]) -> set[int]:
    """The ranks on other hosts that ``rank`` connects to at the start. ``hosts``: the host index of each rank."""
    by_host: dict[int, list[int]] = {}  # ordered by the first rank
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    members = list(by_host.values())
    position = list(by_host).index(hosts[rank])
    index = members[position].index(rank)
    found = {
        members[host][index]
        for host in _partners(position, len(members))
        if index < len(members[host])
    }
    if index == 0:
        found.update(members[host][0] for host in _in_tree(position, len(members)))
    found.update(((rank + 1) % len(hosts), (rank - 1) % len(hosts)))
    return {other for other in found if hosts[other] != hosts[rank]}


def _partners(host: int, count: int) -> set[int]:
    """The hosts at a distance of a power of two, around a ring and in recursive doubling."""
    found = _in_doubling(host, count)
    distance = 1
    while distance < count:
        found.update(((host + distance) % count, (host - distance) % count))
        distance *= 2
    return found


def _in_doubling(host: int, count: int) -> set[int]:
    """The partners in recursive doubling and halving (csrc/collectives/stream/allreduce_doubling.cc). Of the hosts
    beyond a power of two, each forms a pair with another one, and the first host of the pair stands for both."""
    groups = 1 << count.bit_length() - 1
    pairs = count - groups
    in_pair = host < 2 * pairs
    if in_pair and host % 2:
        return {host - 1}
    group = host // 2 if in_pair else host - pairs
    partners = {group ^ 1 << k for k in range(groups.bit_length() - 1)}
    first = {2 * other if other < pairs else other + pairs for other in partners}
    return first | ({host + 1} if in_pair else set())


def _in_tree(host: int, count: int) -> list[int]:
    """The parent and the children of a host in the tree of negotiation."""
    children = range(_RADIX * host + 1, min(_RADIX * (host + 1) + 1, count))
    return [*([(host - 1) // _RADIX] if host else []), *children]
