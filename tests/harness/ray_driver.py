"""A cluster of Ray that all tests of a folder share, because starting one takes seconds.

    pytest_plugins = ["tests.harness.ray_driver"]

    def test_sum(on_ray):
        def use_it(cluster):
            ...
            return result
        assert on_ray(use_it) == 3

The cluster, a ``ray.cluster_utils.Cluster``, and Ray itself are in a process of their own: the tests' process has
neither Ray nor what Ray imports. A function is pickled by value and called there. The main node has :data:`CPUS` CPUs,
which are places for workers; tests may add nodes, and remove them."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from tests.harness import ROOT
from tests.harness.support import environment

CLUSTERS = ROOT / "build" / "clusters"  # requirements/clusters.txt
CPUS = 6
OBJECT_STORE = 80 << 20  # bytes
_START_SECONDS = 90.0
_CALL_SECONDS = 120.0
_END_SECONDS = 30.0
# Without what takes time or reports to others.
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_health_check_period_ms": "300",  # a killed node counts as dead after five failed checks
    "PYTHONWARNINGS": "ignore",
}


def variables() -> dict[str, str]:
    """The environment of programs with Ray."""
    env = environment()
    paths = [str(ROOT), str(CLUSTERS), *env.get("PYTHONPATH", "").split(os.pathsep)]
    return env | _VARIABLES | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}


class RayDriver:
    """The process that has the cluster."""

    def __init__(self, grows_to: int = 0) -> None:
        """``grows_to``: if not 0, the main node has one CPU, and Ray's autoscaler adds nodes with one CPU each, up to
        this number of nodes."""
        self.folder = tempfile.mkdtemp(prefix="r")  # short, since it has Ray's sockets
        (Path(self.folder) / "ray").mkdir()
        here, there = Pipe()
        self._pipe = here
        code = (
            "import sys; from tests.harness.ray_driver import main; main(*map(int, sys.argv[1:]))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(there.fileno()), str(grows_to)],
            env=variables() | {"RAY_TMPDIR": self.folder},
            cwd=ROOT,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        there.close()
        self._receive(_START_SECONDS)

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = _CALL_SECONDS) -> Any:
        """Call ``function(cluster, *args)`` in the process; raises AssertionError with the traceback if it fails."""
        self._pipe.send_bytes(cloudpickle.dumps((function, args)))
        try:
            return self._receive(timeout)
        except AssertionError:
            raise
        except BaseException:  # the test has run into its time limit, and the answer may still come
            self.close(patient=False)
            raise

    def _receive(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            os.kill(self._process.pid, signal.SIGABRT)  # prints the stacks
            self.close(patient=False)
            raise AssertionError(f"the driver of Ray did not answer for {timeout:g} s")
        try:
            is_error, value = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self.close(patient=False)
            raise AssertionError("the driver of Ray has died") from None
        if is_error:
            raise AssertionError(value)
        return value

    @property
    def is_open(self) -> bool:
        """Whether the process still answers."""
        return not self._pipe.closed

    def close(self, *, patient: bool = True) -> None:
        """End the cluster."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if patient else 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_SECONDS)
        for process in psutil.process_iter():  # nodes that the autoscaler has started
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == self.folder:
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Shared:
    """The driver of this process of pytest."""

    def __init__(self) -> None:
        self.driver: RayDriver | None = None


_shared = _Shared()


@pytest.fixture
def on_ray() -> Callable[..., Any]:
    """Calls a function in the process that has the cluster: :meth:`RayDriver.call`."""
    if _shared.driver is None or not _shared.driver.is_open:
        _shared.driver = RayDriver()
    return _shared.driver.call


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster after the last module that uses it, since later tests may look for leftover processes."""
    following = getattr(nextitem, "module", None)
    if __name__ not in getattr(following, "pytest_plugins", []) and _shared.driver is not None:
        driver, _shared.driver = _shared.driver, None
        if driver.is_open:
            driver.close()


# ---- in the process of the driver ------------------------------------------------------------------------------------


def main(descriptor: int, grows_to: int) -> None:
    """Start a cluster, and call what arrives."""
    import faulthandler

    faulthandler.enable()
    import ray
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": CPUS,
        "num_gpus": 0,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
    }
    if grows_to:
        head |= {"num_cpus": 1} | _autoscaling(grows_to)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=True, logging_level="warning")
    with Connection(descriptor) as pipe:
        for function, args in _requests(pipe):
            answer: tuple[bool, Any]
            try:
                answer = False, function(cluster, *args)
            except BaseException:
                answer = True, traceback.format_exc()
            pipe.send_bytes(cloudpickle.dumps(answer))
    ray.shutdown()
    cluster.shutdown()


def _autoscaling(nodes: int) -> dict[str, Any]:
    """Arguments of a main node whose autoscaler runs. The nodes are processes of Ray's provider for tests."""
    from ray._common.network_utils import find_free_port
    from ray.util import get_node_ip_address

    port = find_free_port()
    os.environ |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    resources = {"CPU": 1, "object_store_memory": OBJECT_STORE}
    commands = "initialization", "setup", "head_setup", "worker_setup"
    starting = "head_start_ray", "worker_start_ray"
    config = {
        **{f"{name}_commands": [] for name in commands + starting},
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "cluster_name": "growing",
        "max_workers": nodes - 1,
        "upscaling_speed": 10,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "module": "ray.autoscaler._private.fake_multi_node.node_provider",
            "gcs_address": f"{get_node_ip_address()}:{port}",
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": resources,
                "node_config": {},
                "min_workers": 0,
                "max_workers": nodes - 1,
            },
        },
    }
    file = Path(os.environ["RAY_TMPDIR"]) / "autoscaling.json"  # YAML, too
    file.write_text(json.dumps(config))
    return {"autoscaling_config": str(file), "gcs_server_port": port}


def _requests(pipe: Connection) -> Iterator[Any]:
    yield (lambda _: None), ()  # the cluster has started
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.loads(pipe.recv_bytes())


@contextlib.contextmanager
def added_node(cluster: Any, cpus: int, gpus: int = 0) -> Iterator[Any]:
    """A further node of the cluster, which may pretend to have GPUs. It is killed at the end, if it still is there."""
    node = cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=OBJECT_STORE)
    try:
        yield node
    finally:
        remove_node(cluster, node)


def remove_node(cluster: Any, node: Any) -> None:
    """Kill a node, if it has not been, and wait until the cluster knows."""
    import ray

    identity = node.node_id
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + 60
    while any(each["Alive"] and each["NodeID"] == identity for each in ray.nodes()):
        assert time.monotonic() < deadline, "the cluster does not notice that a node is dead"
        time.sleep(0.05)
