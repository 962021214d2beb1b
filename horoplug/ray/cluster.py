"""What a cluster of Ray has: its nodes, and the places for workers on them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from horoplug.base.variables import argument, seconds
from horoplug.rendezvous.network.addresses import loopback
from horoplug.runner.environment import DECIDED

_ANSWER_SECONDS = 3.0
Resources = Mapping[str, float]
_OWN = {
    f"{prefix}{name}" for name in (*DECIDED, "HOSTNAME") for prefix in ("HOROPLUG_", "HOROVOD_")
}


def require_cluster() -> None:
    """Connect to a cluster, or start one on this machine, if the program has not. Errors: RuntimeError in a client of
    Ray, whose process the ranks do not reach."""
    if not ray.is_initialized():
        ray.init()
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "an executor of horoplug.ray cannot run in a client of Ray (ray://): call it in a task or an actor"
        )


def own_address(node_ids: Iterable[str] | None = None) -> str:
    """An address of this process that the nodes reach. None: all nodes that there may be."""
    here = ray.get_runtime_context().get_node_id()
    if node_ids is not None and set(node_ids) <= {here}:
        return loopback()
    return str(ray.util.get_node_ip_address())


def worker_resources(cpus: float, use_gpu: bool, gpus: float | None) -> dict[str, float]:
    """The resources of one worker. Errors: ValueError for GPUs without ``use_gpu``."""
    if gpus and not use_gpu:
        raise ValueError("gpus_per_worker is set, but use_gpu is False: pass use_gpu=True")
    if use_gpu and gpus is not None and gpus <= 0:
        raise ValueError(f"gpus_per_worker={gpus}: with use_gpu, a worker has at least one GPU")
    wanted = {"CPU": float(cpus)} | ({"GPU": float(gpus or 1)} if use_gpu else {})
    return {name: number for name, number in wanted.items() if number}


def places(available: Resources, needed: Resources) -> int:
    """For how many workers there is room on a node, or in a bundle."""
    # Ray rounds amounts of a resource to ten-thousandths.
    return min(
        (int((available.get(name, 0.0) + 1e-6) // number) for name, number in needed.items()),
        default=1,
    )


def live_nodes() -> list[dict[str, Any]]:
    """The nodes that are alive, as ``ray.nodes()`` describes them, in a stable order: the first one has the head."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return sorted(
        nodes, key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"])
    )


def answers(node_id: str) -> bool:
    """Whether a node is alive. Ray may take 15 s to notice the end of a node, whose port is closed at once."""
    for node in live_nodes():
        if node["NodeID"] == node_id:
            try:
                address = node["NodeManagerAddress"], node["NodeManagerPort"]
                socket.create_connection(address, _ANSWER_SECONDS).close()
                return True
            except OSError:
                return False
    return False


def start_settings(timeout_s: float) -> dict[str, str]:
    """The settings of ranks that wait for each other for so many seconds. Errors: ValueError."""
    argument("timeout_s", timeout_s, seconds)
    return {"START_TIMEOUT": str(timeout_s), "START_TIMEOUT_SET_BY": "timeout_s sets"}


def describe_resources(needed: Resources) -> str:
    """For example "1 CPU and 2 GPUs"."""
    return (
        " and ".join(
            f"{number:g} {name}{'' if number == 1 or name not in ('CPU', 'GPU') else 's'}"
            for name, number in needed.items()
        )
        or "no resources"
    )


def describe_cluster(names: Iterable[str] = ("CPU", "GPU")) -> str:
    """What the cluster has, for example "2 CPUs (0 free) and 0 GPUs on 1 node"."""
    nodes = live_nodes()
    free = ray.available_resources()
    parts = []
    for name in names:
        number = sum(node["Resources"].get(name, 0.0) for node in nodes)
        plural = "" if number == 1 or name not in ("CPU", "GPU") else "s"
        unused = f" ({min(free.get(name, 0.0), number):g} free)" if number else ""
        parts.append(f"{number:g} {name}{plural}{unused}")
    return f"{' and '.join(parts)} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"


def forwarded_variables() -> dict[str, str]:
    """The settings of horoplug in this process's environment, which the ranks also get."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("HOROPLUG_", "HOROVOD_")) and name not in _OWN
    }


def shared_gpus(node_ids: Sequence[str], gpu_ids: Sequence[Sequence[str]]) -> list[str]:
    """For each worker, CUDA_VISIBLE_DEVICES with the GPUs of all workers on its node, so that workers reach each
    other's memory, and ``local_rank()`` is the number of a worker's GPU. Empty: none."""
    by_node: dict[str, list[str]] = {}
    for node, ids in zip(node_ids, gpu_ids, strict=True):
        known = by_node.setdefault(node, [])
        known += [each for each in ids if each not in known]
    return [",".join(by_node[node]) for node in node_ids]


def single_interface(nics: Any) -> str | None:
    """The network interface to use, if exactly one is named."""
    names = [nics] if isinstance(nics, str) else list(nics or ())
    return str(names[0]) if len(names) == 1 else None
