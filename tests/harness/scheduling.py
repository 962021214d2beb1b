"""Decides which tests run at the same time under ``pytest -n`` (pytest-xdist).

A worker gets whole files, so that the fixtures of a module are set up once. The files of one group in ``GROUPS`` go to
one worker, one after the other. The files in ``ALONE`` come after all others, one at a time with nothing beside them.
All results are in one summary.
"""

from collections import OrderedDict

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Files that measure time or need the whole machine, with the reason.
ALONE = {
    "tests/rendezvous/test_measure.py": "measures links",
    "tests/core/test_autotune.py": "measures speed",
    "tests/mpi/test_idle_transport.py": "measures CPU time",
    "tests/project/test_leftovers.py": "looks for leftovers of all other tests",
}
# Files and folders that share a resource of which the machine has one. Other tests may run at the same time.
GROUPS = {
    # Jobs of an MPI, whose ranks take a whole core each while they wait.
    "mpi": (
        "tests/mpi/",
        "tests/gpu/test_mpi.py",
        "tests/gpu/device/test_mpi.py",
        "tests/launcher/test_mpi.py",
    ),
    # Processes that have imported a slow framework, which the tests of one worker share (tests/harness/jobs.py).
    "tensorflow": ("tests/tensorflow/",),
    "keras": ("tests/keras/",),
    "jax": ("tests/jax/",),
    # A cluster of Ray takes long to start, and its tests share one. A process has one session of Spark at a time.
    "ray": ("tests/ray/",),
    "spark": ("tests/spark/",),
    # Network namespaces, ssh servers and Slurm daemons.
    "hosts": (
        "tests/elastic/test_hosts.py",
        "tests/launcher/test_hosts.py",
        "tests/launcher/test_run_hosts.py",
        "tests/launcher/test_network.py",
        "tests/launcher/test_launcher_environment_jobs.py",
        "tests/launcher/test_kubernetes_pods.py",
        "tests/launcher/test_slurm.py",
        "tests/project/test_docs.py",
    ),
}
# Files with independent, long tests: each test is assigned to a worker separately, at the end of the queue.
SPLIT = ("tests/project/test_cpp.py", "tests/api/test_horovod_api.py")


def group_of(test: str) -> str:
    """The group of a test, by its id."""
    file = test.partition("::")[0]
    if file in ALONE:
        return file
    for group, files in GROUPS.items():
        if file.startswith(files):
            return group
    return test if file in SPLIT else file


def queue_order(group: str) -> int:
    """Sort key: the largest groups first and single tests last, so that no worker idles for long at the end."""
    if group in GROUPS:
        return 0
    return 2 if group.startswith(SPLIT) else 1


class Scheduling(LoadScopeScheduling):
    """Two phases: all workers share the queue; then the last remaining worker runs the files in ``ALONE``."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        self.alone: OrderedDict[str, dict[str, bool]] = OrderedDict()

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    @property
    def tests_finished(self) -> bool:
        return not self.alone and super().tests_finished

    @property
    def has_pending(self) -> bool:
        return bool(self.alone) or super().has_pending

    def schedule(self) -> None:
        if self.collection is None:
            if not self._check_nodes_have_same_collection():
                return
            self.collection = list(next(iter(self.registered_collections.values())))
            units: dict[str, dict[str, bool]] = {}
            for test in self.collection:
                units.setdefault(group_of(test), {})[test] = False
            for group in sorted(units, key=queue_order):
                (self.alone if group in ALONE else self.workqueue)[group] = units[group]
        for _ in range(2):  # a worker starts a test only when it has been assigned the next one
            for node in self.nodes:
                self._reschedule(node)

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        super().mark_test_complete(node, item_index, duration)
        self._reschedule_others(node)

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = super().remove_node(node)
        self._reschedule_others(node)
        return crashed

    def _reschedule_others(self, node: WorkerController) -> None:
        for other in self.nodes:
            if other is not node:
                self._reschedule(other)

    def _reschedule(self, node: WorkerController) -> None:
        if self.workqueue or not self.alone or node.shutting_down:
            super()._reschedule(node)
            return
        others = [other for other in self.nodes if other is not node]
        if any(not other.shutting_down for other in others):
            node.shutdown()  # after the tests that it has been assigned
        elif not any(self._pending_of(self.assigned_work[other]) for other in others):
            self.workqueue, self.alone = self.alone, OrderedDict()
            super()._reschedule(node)
