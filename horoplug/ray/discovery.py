"""The nodes of a cluster as the hosts of an elastic job."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from horoplug.ray import cluster
from horoplug.runner.elastic.discovery import HostDiscovery

NO_NODE = (
    "no node of the cluster is called {}; a discovery names nodes by address, host name, id, or NAME of a resource "
    "node:NAME"
)


class RayHostDiscovery(HostDiscovery):
    """The live nodes of the cluster, with as many slots as workers fit on each when nothing else runs.

    Example, in a cluster:

        from horoplug.ray.elastic import RayHostDiscovery

        slots = RayHostDiscovery(cpus_per_slot=1).find_available_hosts_and_slots()
        all(number >= 1 for number in slots.values())  # -> True
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        cpus_per_worker: float | None = None,
        gpus_per_worker: float | None = None,
    ) -> None:
        """``cpus_per_slot``, ``gpus_per_slot`` (with ``use_gpu``): what a worker needs. ``cpus_per_worker`` and
        ``gpus_per_worker`` are other names of them."""
        cpus = cpus_per_slot if cpus_per_worker is None else cpus_per_worker
        gpus = gpus_per_slot if gpus_per_worker is None else gpus_per_worker
        self.needed = cluster.worker_resources(cpus, use_gpu, gpus)
        """The resources of a worker."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The slots of each node. Its name has its address and the beginning of its identity: a node that comes back
        with the same address is another one."""
        found = {
            host_name(node): cluster.places(node["Resources"], self.needed)
            for node in cluster.live_nodes()
        }
        return {name: slots for name, slots in found.items() if slots}


class TestDiscovery(RayHostDiscovery):
    """A discovery for tests of programs: hosts are taken away and given back at random."""

    __test__ = False  # not a class of tests

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        """Use ``min_hosts`` to ``max_hosts`` hosts, others after each ``change_frequency_s`` seconds."""
        import time

        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._range = min_hosts, max_hosts
        self._seconds = change_frequency_s
        self._clock = time.monotonic
        self._next = self._clock()
        self._number = max_hosts

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        if self._clock() >= self._next:
            self._next = self._clock() + self._seconds
            self._number = random.randint(*self._range)
        found = super().find_available_hosts_and_slots()
        return dict(list(found.items())[: self._number])


def nodes_of(hosts: Iterable[str]) -> dict[str, str | None]:
    """The identity of the node that each name means now; None: there is none."""
    nodes = cluster.live_nodes()
    return {host: find_node(host, nodes) for host in hosts}


def host_name(node: dict[str, Any]) -> str:
    """The name of a node in an elastic job."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:8]}"


def find_node(host: str, nodes: Sequence[dict[str, Any]]) -> str | None:
    """The identity of the node that a discovery calls ``host``: by the name of :class:`RayHostDiscovery`, its identity,
    address or host name, or by a resource ``node:host`` of the node, as programs for Horovod do. None: there is
    none."""
    for node in nodes:
        names = (
            host_name(node),
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
        )
        if host in names or f"node:{host}" in node["Resources"]:
            return str(node["NodeID"])
    return None
