"""The pods that KubeRay makes of examples/kubernetes/rayjob.yaml, written after its controllers (v1.3).

    with cluster_image("ray", 1000) as image, RayPods(image, {"/workspace/train.py": text}) as cluster:
        cluster.start()
        status, output = cluster.run_entrypoint()

Differences from KubeRay: the head's port is probed instead of an init container that runs ``ray health-check``; there
is no liveness probe; and the entrypoint is started in the head's pod without Ray's job server, whose packages
(``ray[default]``) the tests do not have. That server would start the same command there, with the same variables."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.harness import cluster_image
from tests.harness.cluster_image import ENVIRONMENT, mounts
from tests.harness.image import Image
from tests.harness.operators import manifests
from tests.harness.pods import KUBERNETES, NAMESPACE, Pod, Pods, quantity
from tests.harness.support import until

_PORT = 6379
# Without what takes time or reports to others.
_CHEAP = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    # A killed pod counts as dead after five checks without an answer.
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
}


def why_not() -> str:
    """Why this machine cannot have such pods; empty if it can."""
    return cluster_image.why_not("ray")


class RayPods:
    """The RayCluster of the RayJob: its head, and the pods of its group of workers."""

    def __init__(self, image: Image, files: Mapping[str, str]) -> None:
        objects = manifests("rayjob")
        self.job, driver = objects["RayJob"], objects["ConfigMap"]
        self.name = f"{self.job['metadata']['name']}-x7k2p"  # the operator appends five characters
        self.pods = Pods(
            image, files, home="/home/ray", config_maps={driver["metadata"]["name"]: driver["data"]}
        )
        self._cluster = self.job["spec"]["rayClusterSpec"]
        (self._group,) = self._cluster["workerGroupSpecs"]
        self._started = 0
        self.head: Pod | None = None

    def __enter__(self) -> RayPods:
        self.pods.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.pods.close()

    @property
    def address(self) -> str:
        """The name of the head's service, which has no address of its own."""
        return f"{self.name}-head-svc.{NAMESPACE}.svc.cluster.local"

    @property
    def workers(self) -> list[Pod]:
        """The workers that run."""
        return [pod for pod in self.pods.pods.values() if pod is not self.head]

    def start(self) -> None:
        """Start the head, and then all workers, and wait until all are ready."""
        self.start_head()
        for _ in range(self._group["replicas"]):
            self.start_worker()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until Ray runs in all pods, as KubeRay does before it starts the entrypoint."""
        for pod in self.pods.pods.values():
            pod.wait_for("Ray runtime started", 90)

    def start_head(self) -> None:
        group = self._cluster["headGroupSpec"]
        params = group["rayStartParams"] | {"dashboard-host": "0.0.0.0"}
        spec = _with_shared_memory(group["template"]["spec"])
        name = f"{self.name}-head"
        self.head = self._start(spec, name, "--head", params, "headgroup", {}, "127.0.0.1")
        self.pods.listening(self.head, _PORT, 60)

    def start_worker(self) -> Pod:
        """Start a worker's pod, with a name that no other has had."""
        self._started += 1
        group = self._group["groupName"]
        spec = _with_shared_memory(self._group["template"]["spec"])
        params = self._group["rayStartParams"] | {"address": f"{self.address}:{_PORT}"}
        own = {"FQ_RAY_IP": self.address, "RAY_IP": self.address.partition(".")[0]}
        name = f"{self.name}-{group}-worker-{self._started}"
        return self._start(spec, name, "", params, group, own, self.address)

    def wait_until_lost(self, pod: Pod) -> None:
        """Wait until Ray knows that a pod is gone. A job that Ray places there before waits until the kernel gives the
        connection up."""
        log = "/tmp/ray/session_latest/logs/gcs_server.out"
        pattern = f"address: {pod.address} .*marked dead"
        until(lambda: self._in_head(["grep", "-q", pattern, log])[0] == 0, 60)

    def _start(
        self,
        spec: dict[str, Any],
        name: str,
        kind: str,
        params: dict[str, str],
        group: str,
        own: dict[str, str],
        address: str,
    ) -> Pod:
        (container,) = spec["containers"]
        limits = container["resources"]["limits"]
        params = {
            "num-cpus": limits["cpu"],
            "memory": str(quantity(limits["memory"])),
            "metrics-export-port": "8080",
            "dashboard-agent-listen-port": "52365",
            "block": "true",
        } | params
        flags = [
            f"--{key}" if text == "true" else f"--{key}={text}"
            for key, text in sorted(params.items())
        ]
        command = " ".join(["ray start", *([kind] if kind else []), *flags])
        container["command"] = ["/bin/bash", "-c", "--", f"ulimit -n 65536; {command}"]
        own |= {
            "RAY_CLUSTER_NAME": self.name,
            "RAY_CLOUD_INSTANCE_ID": name,
            "RAY_NODE_TYPE_NAME": group,
            "KUBERAY_GEN_RAY_START_CMD": command,
            "RAY_PORT": str(_PORT),
            "RAY_ADDRESS": f"{address}:{_PORT}",
            "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
            "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
        }
        service = (self.address, self.address.removesuffix(".cluster.local"))
        names = (name, *service) if kind else (name,)
        return self.pods.start(
            spec, name=name, names=names, env=ENVIRONMENT | _CHEAP | own, mounts=mounts()
        )

    def run_entrypoint(self) -> tuple[int, str]:
        """Run the entrypoint as Ray's job server does. Returns the exit code and what it has printed."""
        return self._in_head(["/bin/bash", "-c", self.job["spec"]["entrypoint"]])

    def _in_head(self, command: list[str]) -> tuple[int, str]:
        assert self.head
        user = self._cluster["headGroupSpec"]["template"]["spec"]["securityContext"]["runAsUser"]
        variables = ENVIRONMENT | _CHEAP | KUBERNETES
        variables |= {
            "HOME": self.pods.home,
            "HOSTNAME": self.head.name,
            "RAY_ADDRESS": f"{self.head.address}:{_PORT}",
            "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "train-5wq8d"}}',
            "RAY_JOB_SUBMISSION_ID": "train-5wq8d",
            "PYTHONUNBUFFERED": "1",
            "RAY_DEDUP_LOGS": "0",  # print the lines of all ranks
        }
        return self.head.execute(command, variables, user)


def _with_shared_memory(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a pod's specification, with a volume for /dev/shm if it has none."""
    copied = copy.deepcopy(dict(spec))
    (container,) = copied["containers"]
    inside = container.setdefault("volumeMounts", [])
    if all(mount["mountPath"] != "/dev/shm" for mount in inside):
        inside.append({"name": "shared-mem", "mountPath": "/dev/shm"})
        size = container["resources"]["limits"]["memory"]
        volume = {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        copied.setdefault("volumes", []).append(volume)
    return copied
