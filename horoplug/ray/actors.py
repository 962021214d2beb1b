"""The processes of an elastic job as actors of Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoplug.ray import cluster
from horoplug.ray.calls import death
from horoplug.ray.discovery import NO_NODE, find_node
from horoplug.ray.ends import end_actors
from horoplug.ray.worker import BaseHorovodWorker
from horoplug.runner.elastic.roster import STARTS_PER_HOST, Start
from horoplug.runner.elastic_worker_job import ElasticWorkerJob
from horoplug.runner.ending.finish import Finish, Why, count
from horoplug.runner.ending.results import Failure
from horoplug.runner.functions.run_task import Outcome

_log = logging.getLogger("horoplug")


@dataclasses.dataclass
class _Process:
    host: str
    node: str
    actor: Any
    identity: Any
    """A reference to what :func:`horoplug.ray.ends.own_process` returns."""
    killed: bool = False
    """Whether the job has ended it."""


class Actors:
    """Starts an actor for each process of an elastic job, on the node that the job has chosen. It implements
    :class:`horoplug.runner.elastic.driver.Workers`."""

    job: ElasticWorkerJob
    """The job; the caller sets it."""

    def __init__(
        self,
        needed: Mapping[str, float],
        variables: Mapping[str, str],
        function: Any,
        executable: tuple[Any, ...] | None,
        queue: Any,
    ) -> None:
        """``needed``: the resources of an actor; ``variables``: its environment variables, beside those of the job;
        ``function``: a reference to the packed function; ``executable``: the arguments of ``start_executable``;
        ``queue``: for the values that rank 0 reports, None: nobody wants them."""
        self._needed = dict(needed)
        self._variables = dict(variables)
        self._function = function
        self._executable = executable
        self._queue = queue
        # An end waits for many seconds if a node does not answer, and a start must not wait for it.
        self._threads = ThreadPoolExecutor(32, "horoplug-ray-actors")
        self._lock = threading.Lock()
        self._live: dict[int, _Process] = {}
        self.results: dict[int, Any] = {}
        """What the function has returned, by process."""
        self.failures: dict[int, Failure] = {}
        """The exceptions, by process."""
        self.said: list[str] = []
        """The lines for the user, which are also in the log."""

    # ---- calls of the driver -----------------------------------------------------------------------------------------

    def start(self, start: Start) -> None:
        needed = dict(self._needed)
        nodes = cluster.live_nodes()
        node = find_node(start.host, nodes)
        variables = self._variables | self.job.environment(start)
        if "GPU" in needed:  # all of the node: which one a worker uses is decided by its local rank
            gpus = {each["NodeID"]: int(each["Resources"].get("GPU", 0)) for each in nodes}
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus.get(node, 0))))
        if node is None:
            self.job.ended(
                start.process, 126, f"could not be started: {NO_NODE.format(start.host)}"
            )
            return
        options = {
            "num_cpus": needed.pop("CPU", 0),
            "num_gpus": needed.pop("GPU", 0),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        }
        actor = ray.remote(BaseHorovodWorker).options(**options).remote(start.slot)
        identity = actor.process.remote()
        with self._lock:
            self._live[start.process] = _Process(start.host, node, actor, identity)
        identity.future().add_done_callback(
            lambda future: self._submit(self._begin, start.process, variables, future)
        )

    def kill(self, process: int) -> None:
        with self._lock:
            found = self._live.get(process)
            if found is None:
                return
            found.killed = True

        def end() -> None:
            self._end(found)
            self.job.ended(process, 137, "was killed, because it did not answer")
            self._forget(process)

        self._submit(end)

    def hosts_changed(self) -> None:
        """Nodes that have left the cluster are lost, whatever the discovery says."""
        alive = {node["NodeID"] for node in cluster.live_nodes()}
        with self._lock:
            lost = {each.host for each in self._live.values() if each.node not in alive}
        for host in lost:
            self._host_lost(host)

    def finish(self) -> None:
        pass

    def fail(self, finish: Finish) -> None:
        self.close()

    def say(self, text: str) -> None:
        self.said.append(text)
        _log.warning("elastic: %s", text)

    # ---- calls of actors, and their ends -----------------------------------------------------------------------------

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in a thread of this object, unless that is closed: Ray's own threads, which call back, must
        not wait for Ray."""
        with contextlib.suppress(RuntimeError):  # closed
            self._threads.submit(function, *arguments)

    def _begin(self, process: int, variables: Mapping[str, str], identity: Any) -> None:
        """Ray has answered which process an actor is. The function of the job begins only now, because
        :func:`end_actors` could not end a process that it does not know, and a stopped process does not answer."""
        if identity.exception() is not None:
            self._ended(process, identity)
            return
        found = self._running(process)
        if found is None:
            return
        # Calls of an actor run in order, and those after a failed one as well: waiting for the last one is enough.
        found.actor.enter_job.remote(variables)
        if self._queue is not None:
            found.actor.set_queue.remote(self._queue)
        result = found.actor.attempt_elastic.remote(self._function, self._executable)
        result.future().add_done_callback(lambda future: self._submit(self._ended, process, future))

    def _running(self, process: int) -> _Process | None:
        """A process that has not been reported as ended and that the job has not killed."""
        with self._lock:
            found = self._live.get(process)
        return None if found is None or found.killed else found

    def _ended(self, process: int, future: Any) -> None:
        """The last call of an actor has ended."""
        found = self._running(process)
        if found is None:
            return
        try:
            self._report(process, found, future)
        except Exception as error:  # the job would wait for the process
            self.job.ended(process, 1, f"has ended, and its outcome cannot be read: {error}")
        self._forget(process)

    def _report(self, process: int, found: _Process, future: Any) -> None:
        error = future.exception()
        if error is None:
            self._returned(process, found, future.result())
        elif isinstance(error, RayActorError):
            self._died(process, found, error)
        else:
            reason = str(getattr(error, "cause", None) or error).strip().splitlines()[0]
            self.job.ended(process, 1, f"has failed: {reason}")

    def _returned(self, process: int, found: _Process, outcome: Outcome) -> None:
        if outcome.has_left:
            self.job.ended(process, 0, "was not needed any more")
        elif outcome.failure is not None:
            self._raised(process, found, outcome.failure)
        else:
            self.results[process] = outcome.value
            self.job.ended(process, 0, "has returned")

    def _raised(self, process: int, found: _Process, failure: Failure) -> None:
        self.failures[process] = failure
        if not self.job.members and len(self.failures) >= STARTS_PER_HOST:
            # Other nodes, which may come, would not help.
            text = f"process {process} on {found.host} raised {failure.text}"
            processes = count(len(self.failures), "process", "processes")
            self.job.stop(Finish(1, Why.NEVER_BEGUN, text, process, processes))
        self.job.ended(process, 1, f"raised {failure.text}")

    def _died(self, process: int, found: _Process, error: RayActorError) -> None:
        """Report the end of an actor: as a lost host if its node is gone."""
        if not cluster.answers(found.node):
            self._host_lost(found.host)
            return
        self._end(found)  # Ray may only have lost its connection
        self.job.ended(process, 1, f"has died: {death(error)}")

    def _host_lost(self, host: str) -> None:
        with self._lock:
            lost = [number for number, each in self._live.items() if each.host == host]
            for number in lost:
                del self._live[number]
        if lost:
            self.job.host_lost(host, "its node has left the cluster")

    def _forget(self, process: int) -> None:
        """End the actor of a process, which is used for one call only."""
        with self._lock:
            found = self._live.pop(process, None)
        if found is not None and not found.killed:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(found.actor)  # not waited for: the function has ended

    @staticmethod
    def _end(*processes: _Process) -> None:
        """End actors whose function may still run, so that it runs no more when this returns."""
        end_actors([(each.actor, each.identity) for each in processes])

    def close(self) -> None:
        """End all actors."""
        with self._lock:
            live, self._live = list(self._live.values()), {}
        self._end(*live)
        self._threads.shutdown(wait=False)
