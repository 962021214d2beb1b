"""A fixed number of workers in a placement group, which are the ranks of one job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from horoplug.ray import cluster
from horoplug.ray.calls import Callbacks, Reports, gather, pack_function, without_executable
from horoplug.ray.ends import end_actors
from horoplug.ray.placement import Layout, Placement
from horoplug.ray.worker import BaseHorovodWorker
from horoplug.runner.worker_job import WorkerJob


class StaticAdapter:
    """A fixed number of workers."""

    def __init__(self, settings: Any, layout: Layout, use_current_placement_group: bool) -> None:
        self._settings = settings
        self._layout = layout
        self._use_current = use_current_placement_group
        self._stack: contextlib.ExitStack | None = None
        self.workers: list[Any] = []
        """The actors, by rank."""

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        if self._stack is not None:
            raise RuntimeError("the executor has workers already: call shutdown() first")
        cluster.require_cluster()
        settings = self._settings
        with contextlib.ExitStack() as stack:
            placement = Placement(
                self._layout,
                use_current=self._use_current,
                seconds=settings.placement_group_timeout_s,
                autoscaling=getattr(settings, "autoscaling", False),
            )
            stack.callback(placement.close)
            kind = ray.remote(BaseHorovodWorker)
            actors = [
                kind.options(**placement.options(number)).remote(number, self._layout.workers)
                for number in range(self._layout.workers)
            ]
            processes = [actor.process.remote() for actor in actors]
            stack.callback(end_actors, list(zip(actors, processes, strict=True)))
            node_ids = [process.node for process in placement.wait(processes)]
            job = WorkerJob(
                node_ids,
                cluster.own_address(node_ids),
                settings=cluster.start_settings(settings.timeout_s),
                interface=cluster.single_interface(settings.nics),
            )
            stack.callback(job.close)
            variables = cluster.forwarded_variables() | dict(extra_env_vars or {})
            gpus = ray.get([actor.get_gpu_ids.remote() for actor in actors])
            visible = cluster.shared_gpus(node_ids, gpus)
            ray.get(
                [
                    actor.enter_job.remote(
                        variables
                        | ({"CUDA_VISIBLE_DEVICES": visible[number]} if visible[number] else {})
                        | job.environment(number)
                    )
                    for number, actor in enumerate(actors)
                ]
            )
            if executable_cls is not None:
                arguments = executable_cls, executable_args, executable_kwargs
                ray.get([actor.start_executable.remote(*arguments) for actor in actors])
            self.workers = [actors[number] for number in job.by_rank]
            self._stack = stack.pop_all()

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks = None) -> list[Any]:
        return self._call(fn, (), {}, callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Callbacks = None,
    ) -> list[Any]:
        return self._call(without_executable(fn), args, kwargs, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        packed = ray.put(pack_function(without_executable(fn), args, kwargs))
        return [
            worker.attempt_or_raise.remote(packed, rank)
            for rank, worker in enumerate(self._running())
        ]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self._call(fn, (), {}, None, single=True)[0]

    def shutdown(self) -> None:
        stack, self._stack, self.workers = self._stack, None, []
        if stack is not None:
            stack.close()

    def _running(self) -> list[Any]:
        if self._stack is None:
            raise RuntimeError(
                "the executor has no workers: call start() first, also again after a failure"
            )
        return self.workers

    def _call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        callbacks: Callbacks,
        *,
        single: bool = False,
    ) -> list[Any]:
        workers = self._running()[:1] if single else self._running()
        packed = ray.put(pack_function(fn, args, kwargs))
        with Reports(callbacks) as reports:
            try:
                if reports.queue is not None:
                    ray.get([worker.set_queue.remote(reports.queue) for worker in workers])
                references = {
                    worker.attempt.remote(packed): rank for rank, worker in enumerate(workers)
                }
                results = gather(references, reports)
                if reports.queue is not None:
                    ray.get([worker.set_queue.remote(None) for worker in workers])
                    reports.deliver()
            except BaseException:
                self.shutdown()  # the other ranks wait for the one that has failed
                raise
        return results
