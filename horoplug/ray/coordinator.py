"""``Coordinator``: ranks and rendezvous for workers that register one by one. ``ray.train.horovod`` of Ray uses it."""

from __future__ import annotations

from typing import Any

from horoplug.base.thread_share import RANKS
from horoplug.ray import cluster
from horoplug.runner.worker_job import WorkerJob

_OF_RANK = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


class Coordinator:
    """Assigns local and cross ranks, and serves the rendezvous until :meth:`close`, or until the process ends."""

    def __init__(self, settings: Any) -> None:
        """``settings``: may have ``timeout_s``, seconds that the ranks wait for each other in ``init()``."""
        self.settings = settings
        self._workers: dict[int, tuple[str, str]] = {}  # by rank: host name and node
        self._job: WorkerJob | None = None

    @property
    def world_size(self) -> int:
        """The number of workers that have registered."""
        return len(self._workers)

    @property
    def hostnames(self) -> list[str]:
        """The host name of each node."""
        return list({node: name for name, node in self._workers.values()}.values())

    @property
    def node_id_by_rank(self) -> dict[str, list[int]]:
        """The ranks on each node."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self._workers):
            found.setdefault(self._workers[rank][1], []).append(rank)
        return found

    @property
    def node_id_string(self) -> str:
        """The nodes and the number of ranks on each: ``node:2,other:2``."""
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in self.node_id_by_rank.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """A worker with this rank runs on a node."""
        self._workers[world_rank] = hostname, node_id

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """The variables with local and cross ranks and sizes, by rank, as numbers. Errors: ValueError if ranks are
        missing."""
        if sorted(self._workers) != list(range(self.world_size)):
            raise ValueError(f"the ranks 0 to n-1 have to register, not {sorted(self._workers)}")
        job = self._serve()
        names = [f"HOROVOD_{name}" for name in _OF_RANK]
        found = {}
        for rank in range(self.world_size):
            variables = job.environment(rank)
            found[rank] = {name: int(variables[name]) for name in names}
        return found

    def establish_rendezvous(self) -> dict[str, str]:
        """The variables of all workers, with the address of the rendezvous and the secret of the job."""
        variables = self._serve().environment(0)
        own = {f"HOROVOD_{name}" for name in (*_OF_RANK, "RANK", "HOSTNAME")} | {RANKS}
        return {name: value for name, value in variables.items() if name not in own}

    def close(self) -> None:
        """Stop serving the rendezvous. Idempotent."""
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def _serve(self) -> WorkerJob:
        if self._job is None:
            node_ids = [self._workers[rank][1] for rank in range(self.world_size)]
            timeout = getattr(self.settings, "timeout_s", None)
            self._job = WorkerJob(
                node_ids,
                cluster.own_address(node_ids),
                settings={} if timeout is None else cluster.start_settings(timeout),
                keep_order=True,
            )
        return self._job
