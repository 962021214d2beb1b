"""``RayExecutor``: functions on actors of Ray, which are the ranks of one job for as long as the executor lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horoplug.base.private_file import open_private_file
from horoplug.ray import cluster
from horoplug.ray.calls import Callbacks
from horoplug.ray.coordinator import Coordinator as Coordinator
from horoplug.ray.elastic import ElasticAdapter, ElasticParams
from horoplug.ray.placement import Layout
from horoplug.ray.static import StaticAdapter

Adapter = ElasticAdapter | StaticAdapter


@dataclasses.dataclass
class MiniSettings:
    """What ``RayExecutor.create_settings`` returns."""

    nics: Any = None
    verbose: int = 1
    key: bytes | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False
    autoscaling: bool = False


class RayExecutor:
    """Runs functions on actors of Ray, which are the ranks of a job. May be used as a context manager.

    Example, in a cluster with two CPUs:

        from horoplug.ray import RayExecutor

        def work(factor):
            import horoplug as hvd

            hvd.init()
            return hvd.rank() * factor

        with RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2) as executor:
            executor.start()
            results = executor.run(work, args=[10])
        results  # -> [0, 10]
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
        *,
        autoscaling: bool = False,
    ) -> MiniSettings:
        """The settings of an executor.

        ``timeout_s``: seconds that the ranks wait for each other in ``init()``; ``placement_group_timeout_s``: seconds
        that :meth:`start` waits until the cluster has room for the workers; ``nics``: the name of the network interface
        to use, as a set (several names have no effect: the interface is found automatically). ``autoscaling``: a
        cluster that is too small can grow: ask it to, and wait. Nothing uses ssh: ``ssh_identity_file`` and ``ssh_str``
        are accepted for compatibility with Horovod."""
        if ssh_str and ssh_identity_file and not Path(ssh_identity_file).exists():
            # Programs may use the file for something else.
            with open(open_private_file(ssh_identity_file), "w", encoding="utf-8") as file:
                file.write(ssh_str)
        return MiniSettings(
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            nics=nics,
            autoscaling=autoscaling,
        )

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        # Elastic jobs:
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        """``settings``: from :meth:`create_settings`, None: its defaults.

        ``num_workers``: the number of workers, anywhere in the cluster; or ``num_hosts`` and ``num_workers_per_host``:
        the same number on each of so many nodes. ``cpus_per_worker``, ``gpus_per_worker`` (with ``use_gpu``): what each
        needs. ``use_current_placement_group``: if this process is in a placement group, as in a trial of Ray Tune, the
        workers are too.

        ``min_workers`` makes the job elastic, as :class:`ElasticRayExecutor`; at most ``max_workers``. ``reset_limit``:
        how often it may be formed again; ``cooldown_range``: for how many seconds (least, most) a host on which workers
        have failed gets no new ones; ``elastic_timeout``: seconds to wait for ``min_workers``; ``override_discovery``:
        the hosts are the nodes of the cluster, and not those of ``settings.discovery``.

        Errors: ValueError for a wrong number of workers."""
        self.settings = RayExecutor.create_settings() if settings is None else settings
        needed = cluster.worker_resources(cpus_per_worker, use_gpu, gpus_per_worker)
        self.adapter: Adapter
        if min_workers is not None:
            if num_workers is not None or num_hosts is not None:
                raise ValueError("give min_workers for an elastic job, or num_workers or num_hosts")
            params = ElasticParams(
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
                cpus_per_worker=cpus_per_worker,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
            )
            self.adapter = ElasticAdapter(self.settings, params)
        else:
            layout = _layout(num_workers, num_hosts, num_workers_per_host, needed)
            self.adapter = StaticAdapter(self.settings, layout, use_current_placement_group)

    @property
    def workers(self) -> list[Any]:
        """The actors, by rank."""
        return self.adapter.workers

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, on each of them make ``executable_cls(*executable_args, **executable_kwargs)``, and set
        the environment variables ``extra_env_vars``. The settings of horoplug in this process's environment
        (``HOROVOD_…``, ``HOROPLUG_…``) are passed to the workers too.

        Errors: PlacementError, a TimeoutError, if the cluster does not have room for the workers; RuntimeError if they
        run already."""
        self.adapter.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks = None) -> list[Any]:
        """Call ``fn(executable)`` on every worker; returns the results by rank. See :meth:`run`."""
        return self.adapter.execute(fn, callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Callbacks = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every worker; returns the results by rank.

        ``callbacks``: functions that are called, in this process, with each value that a rank gives to
        :func:`horoplug.ray.ray_logger.log`.

        Errors: RankError, with the rank and its traceback, if a worker raises an exception or dies; all workers are
        then ended, and :meth:`start` starts others. TypeError if the function cannot be pickled. RuntimeError if there
        are no workers."""
        return self.adapter.run(fn, args, kwargs, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function as :meth:`run`, but return at once, with a reference of Ray for each rank's result.

        ``ray.get`` of it raises a RankError for an exception. The caller decides what then happens to the other
        ranks: they fail in the operations in which they wait once :meth:`shutdown` was called."""
        return self.adapter.run_remote(fn, args, kwargs)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone; returns the result. See :meth:`run`."""
        return self.adapter.execute_single(fn)

    def shutdown(self) -> None:
        """End the workers. Idempotent; :meth:`start` may be called again."""
        self.adapter.shutdown()

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _layout(
    workers: int | None, hosts: int | None, per_host: int, needed: dict[str, float]
) -> Layout:
    if (workers is None) == (hosts is None):
        raise ValueError(
            "give the number of workers: either num_workers, or num_hosts; or min_workers for an elastic job"
        )
    if hosts is not None:
        if hosts < 1 or per_host < 1:
            raise ValueError(
                f"num_hosts={hosts}, num_workers_per_host={per_host}: both have to be at least 1"
            )
        return Layout(hosts * per_host, needed, hosts)
    assert workers is not None
    if workers < 1:
        raise ValueError(f"num_workers={workers}: there has to be at least 1 worker")
    return Layout(workers, needed)
