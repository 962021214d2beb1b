"""Horoplug in Ray Train: :class:`HoroplugTrainer`, and :class:`HoroplugConfig` for other trainers.

    trainer = HoroplugTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=4))
    result = trainer.fit()

``train_loop`` calls ``hvd.init()``, trains as under ``horovodrun``, and reports with ``ray.train.report``. The ranks of
horoplug are those of Ray Train."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import ray

try:
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise ImportError(
        f"horoplug.ray.train needs Ray Train 2.43 or later ({error}): pip install 'horoplug[ray]'"
    ) from error

from horoplug.common import basics
from horoplug.ray import cluster
from horoplug.runner.worker_job import WorkerJob, enter

__all__ = ["HoroplugConfig", "HoroplugTrainer"]

_END_SECONDS: Final = 5.0
"""Limit for the workers to leave the job."""


@dataclasses.dataclass
class HoroplugConfig(BackendConfig):  # type: ignore[misc]
    """The ranks of horoplug are the workers of Ray Train, with the same numbers.

    ``timeout_s``: seconds that the ranks wait for each other in ``init()``; ``env_vars``: environment variables of the
    workers, such as settings of horoplug; ``nics``: the name of the network interface to use, as a set; None: it is
    found automatically.

    Example:

        from horoplug.ray.train import HoroplugConfig

        config = HoroplugConfig(timeout_s=60, env_vars={"HOROVOD_TIMELINE": "timeline.json"})
        config.timeout_s  # -> 60
    """

    timeout_s: float = 300
    env_vars: Mapping[str, str] | None = None
    nics: Any = None

    @property
    def backend_cls(self) -> type[Backend]:
        return _HoroplugBackend

    def to_dict(self) -> dict[str, Any]:
        """What Ray shows of this configuration."""
        return {"timeout_s": self.timeout_s, "nics": sorted(self.nics or ())}


class _HoroplugBackend(Backend):  # type: ignore[misc]
    """Makes the workers of a group the ranks of a job. Runs in the process that controls the group."""

    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._job: WorkerJob | None = None

    def on_start(self, worker_group: Any, backend_config: HoroplugConfig) -> None:
        self._close()
        node_ids = worker_group.execute(_node_id)
        self._job = job = WorkerJob(
            node_ids,
            cluster.own_address(node_ids),
            settings=cluster.start_settings(backend_config.timeout_s),
            interface=cluster.single_interface(backend_config.nics),
            keep_order=True,
        )
        variables = dict(backend_config.env_vars or {})
        ray.get(
            [
                worker_group.execute_single_async(rank, enter, variables | job.environment(rank))
                for rank in range(len(node_ids))
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: HoroplugConfig) -> None:
        with contextlib.suppress(Exception):  # workers may have died, and the others are ended next
            left = worker_group.execute_async(basics.shutdown)
            ray.wait(left, num_returns=len(left), timeout=_END_SECONDS)
        self._close()

    def _close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


class HoroplugTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a training function on the workers of Ray Train, as the ranks of a job of horoplug.

    ``datasets``, ``dataset_config`` and ``kwargs`` are arguments of Ray's ``TorchTrainer``.

    Example, in a cluster with three CPUs:

        import os

        import ray.train
        from horoplug.ray.train import HoroplugConfig, HoroplugTrainer

        def work():
            import horoplug as hvd

            hvd.init()
            ray.train.report({"loss": 0.5})

        trainer = HoroplugTrainer(
            work,
            horoplug_config=HoroplugConfig(timeout_s=60),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=os.getcwd()),
        )
        trainer.fit().error  # -> None
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        horoplug_config: HoroplugConfig | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        datasets: dict[str, Any] | None = None,
        dataset_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """``train_loop_per_worker``: the function, without an argument or with ``train_loop_config``;
        ``horoplug_config``: None: the defaults. The other arguments are those of Ray's ``TorchTrainer``: with
        ``scaling_config=ScalingConfig(num_workers=(least, most))`` the number of workers follows the cluster, and with
        ``run_config=RunConfig(failure_config=FailureConfig(max_failures=...))`` Ray starts the function again, on new
        workers, from the last checkpoint that was reported."""
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=horoplug_config or HoroplugConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            **kwargs,
        )
