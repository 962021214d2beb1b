"""The fields of Kubernetes' and its operators' objects that the manifests in examples/kubernetes use, with their types.

Written after the schemas that Kubernetes and the operators publish."""

from __future__ import annotations

from typing import Any


class OneOf(tuple[str, ...]):
    """A type of a field: one of these strings."""


class Map:
    """A type of a field: a mapping from strings to values of a type."""

    def __init__(self, of: Any) -> None:
        self.of = of


# A type is a Python type; a dictionary of fields; a list with the type of its elements; OneOf; or Map. A field must be
# there if "!" follows its name.
METADATA = {"name!": str, "labels": Map(str)}
RESOURCES = {"limits": Map(str), "requests": Map(str)}
RESTART = OneOf(("Always", "OnFailure", "Never"))
POD_SECURITY = {"runAsNonRoot!": bool, "runAsUser!": int, "runAsGroup!": int, "fsGroup!": int}
CONTAINER_SECURITY = {"allowPrivilegeEscalation!": bool, "capabilities!": {"drop!": [str]}}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "securityContext!": CONTAINER_SECURITY,
    "resources": RESOURCES,
    "env": [{"name!": str, "value!": str}],
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
    "readinessProbe": {"tcpSocket!": {"port!": int}, "periodSeconds": int},
}
VOLUME = {
    "name!": str,
    "secret": {"secretName!": str, "defaultMode": int},
    "configMap": {"name!": str},
    "emptyDir": {"medium": OneOf(("Memory",)), "sizeLimit": str},
}
POD = {
    "spec!": {
        "subdomain": str,
        "restartPolicy": RESTART,
        "securityContext!": POD_SECURITY,
        "containers!": [CONTAINER],
        "volumes": [VOLUME],
    }
}
JOB = {
    "completionMode": OneOf(("Indexed",)),
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "template!": POD,
}
JOB_SET = {
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
    "failurePolicy": {"maxRestarts": int},
    "replicatedJobs!": [
        {
            "name!": str,
            "replicas": int,
            "template!": {"metadata": {"labels": Map(str)}, "spec!": JOB},
        }
    ],
}
REPLICAS = {"replicas!": int, "restartPolicy": RESTART, "template!": POD}
RUN_POLICY = {"cleanPodPolicy": OneOf(("All", "Running", "None")), "backoffLimit": int}
SPARK_POD = {
    "cores!": int,
    "memory!": str,
    "serviceAccount": str,
    "configMaps": [{"name!": str, "path!": str}],
    "podSecurityContext!": POD_SECURITY,
    "securityContext!": CONTAINER_SECURITY,
}
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "ConfigMap"): {"data!": Map(str)},
    ("v1", "Service"): {
        "spec!": {
            "clusterIP": OneOf(("None",)),
            "publishNotReadyAddresses": bool,
            "selector": Map(str),
        }
    },
    ("batch/v1", "Job"): {"spec!": JOB},
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {"spec!": JOB_SET},
    ("kubeflow.org/v2beta1", "MPIJob"): {
        "spec!": {
            "slotsPerWorker": int,
            "sshAuthMountPath": str,
            "launcherCreationPolicy": OneOf(("AtStartup", "WaitForWorkersReady")),
            "mpiImplementation": OneOf(("OpenMPI", "Intel", "MPICH")),
            "runPolicy": RUN_POLICY,
            "mpiReplicaSpecs!": {"Launcher!": REPLICAS, "Worker!": REPLICAS},
        }
    },
    ("kubeflow.org/v1", "PyTorchJob"): {
        "spec!": {
            "runPolicy": RUN_POLICY,
            "pytorchReplicaSpecs!": {"Master!": REPLICAS, "Worker!": REPLICAS},
        }
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "spec!": {
            "mlPolicy": {"numNodes": int, "torch": {}},
            "template!": {"spec!": JOB_SET},
        }
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "spec!": {
            "runtimeRef!": {"apiGroup": str, "kind": str, "name!": str},
            "trainer": {
                "numNodes": int,
                "numProcPerNode": int,
                "image": str,
                "command": [str],
                "resourcesPerNode": RESOURCES,
            },
        }
    },
    ("ray.io/v1", "RayJob"): {
        "spec!": {
            "entrypoint": str,
            "shutdownAfterJobFinishes": bool,
            "backoffLimit": int,
            "rayClusterSpec": {
                "rayVersion": str,
                "headGroupSpec!": {"rayStartParams": Map(str), "template!": POD},
                "workerGroupSpecs": [
                    {
                        "groupName!": str,
                        "replicas": int,
                        "minReplicas": int,
                        "maxReplicas": int,
                        "rayStartParams": Map(str),
                        "template!": POD,
                    }
                ],
            },
        }
    },
    ("sparkoperator.k8s.io/v1beta2", "SparkApplication"): {
        "spec!": {
            "type!": OneOf(("Java", "Scala", "Python", "R")),
            "pythonVersion": OneOf(("2", "3")),
            "mode": OneOf(("cluster", "client")),
            "sparkVersion!": str,
            "image": str,
            "mainApplicationFile!": str,
            "restartPolicy": {
                "type": OneOf(("Never", "OnFailure", "Always")),
                "onFailureRetries": int,
                "onFailureRetryInterval": int,
            },
            "sparkConf": Map(str),
            "driver!": SPARK_POD,
            "executor!": SPARK_POD | {"instances": int},
        }
    },
}


def problems(value: Any, kind: Any, place: str) -> list[str]:
    """A line for each difference between a value and its type."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return [f"{place} must be a mapping"]
        known = {name.rstrip("!"): each for name, each in kind.items()}
        found = [f"{place}.{name} is unknown" for name in value if name not in known]
        required = {name.rstrip("!") for name in kind if name.endswith("!")}
        found += [f"{place}.{name} is missing" for name in sorted(required - set(value))]
        pairs = [(value[name], known[name], f"{place}.{name}") for name in value if name in known]
    elif isinstance(kind, Map):
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            return [f"{place} must be a mapping from strings"]
        found, pairs = [], [(each, kind.of, f"{place}.{name}") for name, each in value.items()]
    elif isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{place} must be a list"]
        found, pairs = [], [(each, kind[0], f"{place}[{n}]") for n, each in enumerate(value)]
    elif isinstance(kind, OneOf):
        return [] if value in kind else [f"{place} must be one of {', '.join(kind)}"]
    else:
        return [] if type(value) is kind else [f"{place} must be of type {kind.__name__}"]
    for each in pairs:
        found += problems(*each)
    return found
