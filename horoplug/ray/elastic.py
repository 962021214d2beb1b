"""``ElasticRayExecutor``: a job whose actors come and go with the nodes of the cluster, and are replaced if they
fail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import ray

from horoplug.ray import cluster
from horoplug.ray.actors import Actors
from horoplug.ray.calls import Callbacks, Reports, pack_function, without_executable
from horoplug.ray.discovery import NO_NODE, nodes_of
from horoplug.ray.discovery import RayHostDiscovery as RayHostDiscovery
from horoplug.ray.discovery import TestDiscovery as TestDiscovery
from horoplug.ray.elastic_thread import run_job
from horoplug.runner.elastic.discovery import HostDiscovery, MergedHosts
from horoplug.runner.elastic.roster import make_limits
from horoplug.runner.elastic_worker_job import ElasticWorkerJob
from horoplug.runner.ending.finish import Finish
from horoplug.runner.ending.results import RankError
from horoplug.runner.terms import Terms

__all__ = [
    "ElasticAdapter",
    "ElasticParams",
    "ElasticRayExecutor",
    "RayHostDiscovery",
    "TestDiscovery",
]

_UNLIMITED = 1 << 20
_OF_RAY_EXECUTOR = Terms(minimum="min_workers", maximum="max_workers")


@dataclasses.dataclass
class ElasticParams:
    """What an elastic job may have. The fields are arguments of :class:`horoplug.ray.RayExecutor`."""

    min_workers: int
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None

    @property
    def elastic(self) -> bool:
        """True."""
        return True

    @property
    def needed(self) -> dict[str, float]:
        """The resources of a worker. Errors: ValueError."""
        return cluster.worker_resources(self.cpus_per_worker, self.use_gpu, self.gpus_per_worker)


@dataclasses.dataclass
class ElasticSettings:
    """What ``ElasticRayExecutor.create_settings`` returns."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    timeout_s: float = 30
    ssh_identity_file: str | None = None
    nics: Any = None
    cooldown_range: Sequence[float] | None = None
    discovery: HostDiscovery | None = None
    autoscaling: bool = False
    verbose: int = 1

    @property
    def min_np(self) -> int:
        """The former name of :attr:`min_num_proc`."""
        return self.min_num_proc

    @property
    def max_np(self) -> int | None:
        """The former name of :attr:`max_num_proc`."""
        return self.max_num_proc


class ElasticAdapter:
    """Runs functions as elastic jobs, each on new actors."""

    def __init__(
        self, settings: Any, params: ElasticParams, terms: Terms = _OF_RAY_EXECUTOR
    ) -> None:
        """``settings``: has ``timeout_s``, ``nics``, and maybe ``autoscaling`` and ``discovery``; ``terms``: what the
        caller calls ``params``."""
        self._terms = terms
        self._settings = settings
        self._params = params
        self._most = params.max_workers or _UNLIMITED
        make_limits(params.min_workers, self._most, terms=terms)  # an error is better raised here
        self._needed = params.needed
        self._is_started = False
        self._executable: tuple[Any, ...] | None = None
        self._variables: dict[str, str] = {}
        self.workers: list[Any] = []
        """Empty: actors exist only while a function runs."""

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        cluster.require_cluster()
        self._executable = (
            None if executable_cls is None else (executable_cls, executable_args, executable_kwargs)
        )
        self._variables = dict(extra_env_vars or {})
        self._is_started = True

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

    def run_remote(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "run_remote: an elastic job has no fixed actors; use run in a task"
        )

    def execute_single(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("execute_single: an elastic job has no fixed actors; use execute")

    def shutdown(self) -> None:
        self._is_started = False

    def _call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        callbacks: Callbacks,
    ) -> list[Any]:
        if not self._is_started:
            raise RuntimeError("the executor was not started: call start() first")
        discovery = self._discovery()
        function = ray.put(pack_function(fn, args, kwargs))
        variables = cluster.forwarded_variables() | self._variables
        with contextlib.ExitStack() as stack:
            reports = stack.enter_context(Reports(callbacks))
            actors = Actors(self._needed, variables, function, self._executable, reports.queue)
            stack.callback(actors.close)
            if getattr(self._settings, "autoscaling", False):
                stack.enter_context(self._requested())
            slots = discovery.find_available_hosts_and_slots()
            if sum(slots.values()) < self._params.min_workers:
                actors.say(self._shortage())
            job = ElasticWorkerJob(
                actors,
                make_limits(
                    self._params.min_workers,
                    self._most,
                    wait=self._params.elastic_timeout,
                    resets=self._params.reset_limit,
                    hosts_may_come=True,
                ),
                slots,
                cluster.own_address(),
                discovery=discovery,
                cooldown_range=_pair(self._params.cooldown_range),
                settings=cluster.start_settings(self._settings.timeout_s),
                interface=cluster.single_interface(self._settings.nics),
            )
            actors.job = stack.enter_context(job)
            outcome = run_job(job, reports)
            members = job.members
        return self._results(outcome, members, actors)

    def _discovery(self) -> HostDiscovery:
        given: HostDiscovery | None = getattr(self._settings, "discovery", None)
        if self._params.override_discovery or given is None:
            params = self._params
            return RayHostDiscovery(params.use_gpu, params.cpus_per_worker, params.gpus_per_worker)
        return MergedHosts(given, nodes_of, NO_NODE)

    @contextlib.contextmanager
    def _requested(self) -> Iterator[None]:
        """Ask the autoscaler for room for as many workers as the job may have."""
        from ray.autoscaler.sdk import request_resources

        number = self._params.max_workers or self._params.min_workers
        request_resources(bundles=[dict(self._needed)] * number)
        try:
            yield
        finally:
            request_resources(bundles=[])

    def _shortage(self) -> str:
        params = self._params
        return (
            f"there is no room yet for {params.min_workers} workers with {cluster.describe_resources(self._needed)} "
            f"each: the cluster has {cluster.describe_cluster(self._needed)}; the job waits for more nodes for up to "
            f"{params.elastic_timeout:g} s (elastic_timeout)"
        )

    def _results(self, outcome: Finish, members: tuple[int, ...], actors: Actors) -> list[Any]:
        if outcome.code == 0:
            returned = [process for process in members if process in actors.results]
            return [actors.results[process] for process in returned or sorted(actors.results)]
        text, process = outcome.text(self._terms), outcome.process
        if not actors.failures and not members:
            text += f"; the cluster has {cluster.describe_cluster(self._needed)}"
        rank = members.index(process) if process in members else None
        if process in actors.failures:
            raise actors.failures[process].error(text, rank)
        raise RankError(text, rank)


class ElasticRayExecutor:
    """Runs a function as an elastic job: actors that fail are replaced, and actors follow the nodes of the cluster.

    Example, in a cluster with two CPUs:

        from horoplug.ray import ElasticRayExecutor

        def work():
            import horoplug as hvd

            hvd.init()
            return hvd.rank()

        settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=2)
        executor = ElasticRayExecutor(settings)
        executor.start()
        executor.run(work)  # -> [0, 1]
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Any = None,
        min_np: int | None = None,
        max_np: int | None = None,
        *,
        cooldown_range: Sequence[float] | None = None,
        discovery: HostDiscovery | None = None,
        autoscaling: bool = False,
        **kwargs: Any,
    ) -> ElasticSettings:
        """The settings of an executor.

        ``min_num_proc``, ``max_num_proc``: the least and the largest number of workers, None: as many as the cluster
        has room for; ``min_np`` and ``max_np`` are their former names. ``reset_limit``, ``elastic_timeout``,
        ``cooldown_range``: see :class:`horoplug.ray.RayExecutor`. ``timeout_s``, ``nics``: see
        ``RayExecutor.create_settings``. ``discovery``: finds the hosts, with ``override_discovery=False``.
        ``autoscaling``: ask the cluster to grow. ``ssh_identity_file`` and other arguments of Horovod's settings have
        no effect."""
        return ElasticSettings(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            cooldown_range=cooldown_range,
            discovery=discovery,
            autoscaling=autoscaling,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        """``settings``: from :meth:`create_settings`; ``cpus_per_slot``, ``gpus_per_slot`` (with ``use_gpu``): what a
        worker needs; ``env_vars``: environment variables of the workers; ``override_discovery``: the hosts are the
        nodes of the cluster, and not those of ``settings.discovery``. Errors: ValueError for wrong numbers."""
        self.settings = settings
        self._variables = dict(env_vars or {})
        params = ElasticParams(
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=getattr(settings, "cooldown_range", None),
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
        )
        self._adapter = ElasticAdapter(settings, params, Terms())

    def start(self) -> None:
        """Connect to the cluster."""
        self._adapter.start(extra_env_vars=self._variables)

    def run(self, worker_fn: Callable[[], Any], callbacks: Callbacks = None) -> list[Any]:
        """Call ``worker_fn()`` on every worker; returns the results of the last workers, by rank.

        ``worker_fn`` keeps its state in a ``hvd.elastic`` state and trains in a function under ``hvd.elastic.run``.
        ``callbacks``: see :meth:`horoplug.ray.RayExecutor.run`.

        Errors: RankError once the job has failed; TypeError if the function cannot be pickled."""
        return self._adapter.run(worker_fn, callbacks=callbacks)


def _pair(numbers: Sequence[float] | None) -> tuple[float, float] | None:
    if numbers is None:
        return None
    least, most = numbers
    return float(least), float(most)
