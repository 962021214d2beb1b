"""The pods of examples/kubernetes/sparkapplication.yaml: the driver, and the executors that it asks for.

    with cluster_image("spark", 185) as image, SparkPods(image, {"/workspace/train.py": text}) as application:
        driver = application.start_driver()
        status, output = driver.wait()

The driver runs Spark's own scheduler for Kubernetes against a stand-in for the API server, so that the executors' pods,
with their variables and files, are those that Spark makes. The driver's pod is written after Spark's steps for
``spark-submit --deploy-mode cluster``, which the operator runs, and the entrypoint after that of Spark's image.

Differences from a cluster: the API server speaks HTTP and asks for no token; the driver polls it instead of watching;
and settings that save time, in :data:`_CHEAP`."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import cluster_image
from tests.harness.api_server import NAME, PORT, ApiServer
from tests.harness.cluster_image import CLUSTERS, ENVIRONMENT, mounts
from tests.harness.image import Image
from tests.harness.operators import manifests
from tests.harness.pods import NAMESPACE, Pod, Pods

_HOME = "/opt/spark"
_JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
_CHEAP = {
    "spark.driver.extraJavaOptions": _JAVA,
    "spark.executor.extraJavaOptions": _JAVA,
    "spark.kubernetes.allocation.batch.delay": "101ms",
    "spark.kubernetes.executor.apiPollingInterval": "300ms",
    "spark.kubernetes.executor.enableApiWatcher": "false",
    "spark.log.level": "WARN",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# What the entrypoint of Spark's image does with its first argument.
_ENTRYPOINT = f"""
role=$1
shift
if [ "$role" = driver ]; then
  exec {_HOME}/bin/spark-submit --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
    --deploy-mode client "$@"
fi
options=$(env | sort -V | sed -n 's/^SPARK_JAVA_OPT_[0-9]*=//p')
exec "$JAVA_HOME/bin/java" $options "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
  -cp "$SPARK_CONF_DIR:{_HOME}/jars/*" org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
  --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
  --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
  --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
"""


def why_not() -> str:
    """Why this machine cannot have such pods; empty if it can."""
    if _java() is None:
        return "needs Java"
    return cluster_image.why_not("pyspark")


class SparkPods:
    """The application of the manifest, with the pods that belong to it."""

    def __init__(self, image: Image, files: Mapping[str, str]) -> None:
        objects = manifests("sparkapplication")
        application, maps = objects["SparkApplication"], objects["ConfigMap"]
        self.name, self._spec = application["metadata"]["name"], application["spec"]
        assert (self._spec["type"], self._spec["mode"]) == ("Python", "cluster")
        self.pods = Pods(
            image, files, home="/home/spark", config_maps={maps["metadata"]["name"]: maps["data"]}
        )
        self.api = ApiServer(self.pods, self._start_executor)
        self._id = f"spark-{secrets.token_hex(16)}"
        self._service = f"{self.name}-{secrets.token_hex(8)}-driver-svc.{NAMESPACE}.svc"

    def __enter__(self) -> SparkPods:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.pods)
            stack.enter_context(self.api)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def executors(self) -> list[Pod]:
        """The executors' pods, in the order in which Spark has asked for them."""
        return list(self.api.started.values())

    def start_driver(self) -> Pod:
        driver = self._spec["driver"]
        lines = [f"{key}={text}\n" for key, text in self._properties().items()]
        self.pods.config_maps |= {"spark-drv-conf-map": {"spark.properties": "".join(lines)}}
        name = f"{self.name}-driver"
        environment = {
            "SPARK_USER": "root",  # the operator's
            "SPARK_APPLICATION_ID": self._id,
            "SPARK_CONF_DIR": f"{_HOME}/conf",
            "SPARK_LOCAL_DIRS": "/var/data/spark-local",
        }
        volumes: dict[str, tuple[str, dict[str, Any]]] = {
            "spark-local-dir-1": ("/var/data/spark-local", {"emptyDir": {}}),
            "spark-conf-volume-driver": (
                f"{_HOME}/conf",
                {"configMap": {"name": "spark-drv-conf-map"}},
            ),
            # Those of the manifest, from the operator's webhook.
            **{
                f"{each['name']}-vol": (each["path"], {"configMap": {"name": each["name"]}})
                for each in driver["configMaps"]
            },
        }
        args = ["driver", "--properties-file", f"{_HOME}/conf/spark.properties"]
        args += ["--class", "org.apache.spark.deploy.PythonRunner"]
        container: dict[str, Any] = {
            "name": "spark-kubernetes-driver",
            "args": [*args, self._spec["mainApplicationFile"]],
            "env": [{"name": key, "value": text} for key, text in environment.items()],
            "volumeMounts": [
                {"name": each, "mountPath": path} for each, (path, _) in volumes.items()
            ],
        }
        container["env"].append(
            {
                "name": "SPARK_DRIVER_BIND_ADDRESS",
                "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
            }
        )
        spec = {
            "containers": [container],
            "volumes": [{"name": each, **source} for each, (_, source) in volumes.items()],
        }
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        described = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        self.api.add("pods", described | {"status": status})
        return self._start(spec, name, driver, (self._service,))

    def _properties(self) -> dict[str, str]:
        """What the driver's pod has in its file of settings."""
        driver, executor = self._spec["driver"], self._spec["executor"]
        server = f"http://{NAME}:{PORT}"
        return {
            **_CHEAP,
            "spark.master": f"k8s://{server}",
            "spark.kubernetes.driver.master": server,
            "spark.submit.deployMode": "cluster",
            "spark.app.id": self._id,
            "spark.app.name": self.name,
            "spark.driver.host": self._service,
            "spark.driver.port": "7078",
            "spark.driver.blockManager.port": "7079",
            "spark.driver.cores": str(driver["cores"]),
            "spark.driver.memory": driver["memory"],
            "spark.executor.instances": str(executor["instances"]),
            "spark.executor.cores": str(executor["cores"]),
            "spark.executor.memory": executor["memory"],
            "spark.kubernetes.namespace": NAMESPACE,
            "spark.kubernetes.container.image": self._spec["image"],
            "spark.kubernetes.driver.pod.name": f"{self.name}-driver",
            "spark.kubernetes.executor.podNamePrefix": f"{self.name}-{self._id[6:22]}",
            "spark.kubernetes.authenticate.driver.serviceAccountName": driver["serviceAccount"],
            "spark.kubernetes.memoryOverheadFactor": "0.4",
            "spark.kubernetes.pyspark.pythonVersion": self._spec["pythonVersion"],
            "spark.kubernetes.resource.type": "python",
            "spark.kubernetes.submitInDriver": "true",
            **self._spec["sparkConf"],
        }

    def _start_executor(self, given: dict[str, Any]) -> Pod:
        return self._start(given["spec"], given["metadata"]["name"], self._spec["executor"], ())

    def _start(
        self, spec: dict[str, Any], name: str, part: Mapping[str, Any], names: tuple[str, ...]
    ) -> Pod:
        """Start a pod, with what the operator's webhook adds. ``part``: of the manifest."""
        (container,) = spec["containers"]
        container["command"] = ["/bin/bash", "-c", _ENTRYPOINT, "entrypoint"]
        spec["securityContext"] = part["podSecurityContext"]
        return self.pods.start(
            spec,
            name=name,
            names=(name, *names),
            env=ENVIRONMENT | {"SPARK_HOME": _HOME, "JAVA_HOME": str(_java())},
            mounts=mounts()
            | {f"{_HOME}/{each}": CLUSTERS / "pyspark" / each for each in ("bin", "jars")},
        )


def _java() -> Path | None:
    """The folder of this machine's Java."""
    if home := os.environ.get("JAVA_HOME"):
        return Path(home)
    program = shutil.which("java")
    return Path(program).resolve().parents[1] if program else None
