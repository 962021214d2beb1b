"""Decides which tests run at the same time under ``pytest -n`` (pytest-xdist): a plugin of pytest.

- A worker gets whole files, so that the fixtures of a module are set up once. The files of one group in ``GROUPS`` go
  to one worker, one after the other.
- The files in ``ALONE`` come after all others, one at a time with nothing beside them. They are the last group, and its
  worker waits until all other workers have ended their sessions: each holds a lock until then.

All results are in one summary.

pytest-xdist's own ``--dist loadgroup`` would need no scheduler, but with pytest 9.2 it ignores the groups
(https://github.com/pytest-dev/pytest-xdist/issues/1386), and it appends the group to the names of tests."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import pytest

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
    """The group of a test, by its id. One worker runs all tests of a group."""
    file = test.partition("::")[0]
    if file in ALONE:
        return "alone"
    if file in SPLIT:
        return test
    return next((name for name, files in GROUPS.items() if file.startswith(files)), file)


def queue_order(test: str) -> tuple[int, int]:
    """Sort key: the largest groups first and single tests late, so that no worker idles for long at the end."""
    group = group_of(test)
    if group == "alone":
        return 3, [*ALONE].index(test.partition("::")[0])
    return (0 if group in GROUPS else 2 if group == test else 1), 0


_LOCKED = pytest.StashKey[IO[bytes]]()
"""Of a worker: a file that it locks, shared with the others, and for itself while it runs the tests in ``ALONE``. The
kernel ends the lock of a worker that dies. Processes that a worker forks do not inherit it."""
_PATH = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[_LOCKED] = open(config.workerinput["locked"], "r+b")  # noqa: SIM115
        fcntl.lockf(config.stash[_LOCKED], fcntl.LOCK_SH)
    elif config.getoption("dist", "no") != "no":
        config.option.loadscopereorder = False  # the order is that of queue_order
        handle, config.stash[_PATH] = tempfile.mkstemp(prefix="tests-locked-")
        os.close(handle)
        config.add_cleanup(lambda: os.unlink(config.stash[_PATH]))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["locked"] = node.config.stash[_PATH]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: queue_order(item.nodeid))


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # outside of the time limit of a test
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _LOCKED in item.config.stash and group_of(item.nodeid) == "alone":
        fcntl.lockf(item.config.stash[_LOCKED], fcntl.LOCK_EX)
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # after the ends of all fixtures
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    if _LOCKED in session.config.stash:
        session.config.stash[_LOCKED].close()
