"""JSON schemas of the objects of Kubernetes and its operators, for the manifests in examples/kubernetes.

The package kubeflow-trainer-api has those of Kubernetes, JobSet and Kubeflow Trainer, as models of pydantic that are
generated from what Kubernetes and the operators publish. No package on PyPI has those of the other operators. Their own
fields, as far as the manifests use them, are written down here after what they publish; their pods are Kubernetes'."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.harness import ROOT

CLUSTERS = ROOT / "build" / "clusters"  # requirements/clusters.txt
Schema = dict[str, Any]
# Strings of which the published schemas say only in their descriptions what they may be.
_VALUES = {
    "clusterIP": ["None"],
    "completionMode": ["Indexed", "NonIndexed"],
    "medium": ["Memory"],
    "restartPolicy": ["Always", "OnFailure", "Never"],
}
_MODELS = {
    ("v1", "ConfigMap"): "IoK8sApiCoreV1ConfigMap",
    ("v1", "Service"): "IoK8sApiCoreV1Service",
    ("batch/v1", "Job"): "IoK8sApiBatchV1Job",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
}
_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_STRINGS: Schema = {"type": "object", "additionalProperties": _STRING}


def one_of(*values: str) -> Schema:
    return {"enum": [*values]}


def fields(needed: Schema, **others: Schema) -> Schema:
    """An object with these fields, of which it must have those of ``needed``, and no others."""
    return {
        "type": "object",
        "properties": needed | others,
        "required": [*needed],
        "additionalProperties": False,
    }


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _definition(model: str) -> Schema:
    return {"$ref": f"#/$defs/IoK8sApiCoreV1{model}"}


_POD = _definition("PodTemplateSpec")
_REPLICAS = fields(
    {"replicas": _INTEGER, "template": _POD},
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
)
_RUN_POLICY = fields({}, cleanPodPolicy=one_of("All", "Running", "None"), backoffLimit=_INTEGER)
_GROUP = {"rayStartParams": _STRINGS, "template": _POD}
_ROLE = {
    "cores": _INTEGER,
    "memory": _STRING,
    "podSecurityContext": _definition("PodSecurityContext"),
    "securityContext": _definition("SecurityContext"),
}
_MOUNTED = list_of(fields({"name": _STRING, "path": _STRING}))
_SPECIFICATIONS: dict[tuple[str, str], Schema] = {
    ("kubeflow.org/v2beta1", "MPIJob"): fields(
        {"mpiReplicaSpecs": fields({"Launcher": _REPLICAS, "Worker": _REPLICAS})},
        slotsPerWorker=_INTEGER,
        sshAuthMountPath=_STRING,
        launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
        runPolicy=_RUN_POLICY,
    ),
    ("kubeflow.org/v1", "PyTorchJob"): fields(
        {"pytorchReplicaSpecs": fields({"Master": _REPLICAS, "Worker": _REPLICAS})},
        runPolicy=_RUN_POLICY,
    ),
    ("ray.io/v1", "RayJob"): fields(
        {},
        entrypoint=_STRING,
        shutdownAfterJobFinishes=_BOOLEAN,
        backoffLimit=_INTEGER,
        rayClusterSpec=fields(
            {"headGroupSpec": fields(_GROUP)},
            rayVersion=_STRING,
            workerGroupSpecs=list_of(
                fields(
                    _GROUP | {"groupName": _STRING},
                    replicas=_INTEGER,
                    minReplicas=_INTEGER,
                    maxReplicas=_INTEGER,
                )
            ),
        ),
    ),
    ("sparkoperator.k8s.io/v1beta2", "SparkApplication"): fields(
        {
            "type": one_of("Java", "Scala", "Python", "R"),
            "sparkVersion": _STRING,
            "mainApplicationFile": _STRING,
            "driver": fields(_ROLE, serviceAccount=_STRING, configMaps=_MOUNTED),
            "executor": fields(_ROLE, configMaps=_MOUNTED, instances=_INTEGER),
        },
        pythonVersion=one_of("2", "3"),
        mode=one_of("cluster", "client"),
        image=_STRING,
        restartPolicy=fields(
            {},
            type=one_of("Never", "OnFailure", "Always"),
            onFailureRetries=_INTEGER,
            onFailureRetryInterval=_INTEGER,
        ),
        sparkConf=_STRINGS,
    ),
}


def _strict(schema: Any) -> Any:
    """The schema without what pydantic adds, and with an error for each field that it does not have."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _strict(value) for key, value in schema.items()}
    if "anyOf" in schema:  # a type, or null if the field is left out
        kinds = [each for each in schema["anyOf"] if each != {"type": "null"}]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    properties = schema.get("properties", {})
    kinds = [each for name, each in properties.items() if name.startswith("oneof_schema_")]
    if kinds:  # a number or a string, for example
        return {"anyOf": kinds}
    for name, values in _VALUES.items():
        if properties.get(name, {}).get("type") == "string":
            properties[name]["enum"] = values
    return schema | {"additionalProperties": False} if properties else schema


@functools.cache
def validator(version: str, kind: str) -> Any:
    """The validator, of jsonschema, of the objects of this ``apiVersion`` and ``kind``."""
    if not CLUSTERS.is_dir():
        pytest.skip("needs kubeflow-trainer-api in build/clusters (make build/clusters/.installed)")
    # Only for these imports: with the other packages of the folder, imports of frameworks take longer.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CLUSTERS))
        import jsonschema
        from kubeflow_trainer_api import models
    if name := _MODELS.get((version, kind)):
        schema = _strict(getattr(models, name).model_json_schema(by_alias=True))
    else:
        pod = _strict(models.IoK8sApiCoreV1PodTemplateSpec.model_json_schema(by_alias=True))
        known = pod.pop("$defs")
        known["IoK8sApiCoreV1PodTemplateSpec"] = pod
        metadata = {"$ref": "#/$defs/IoK8sApimachineryPkgApisMetaV1ObjectMeta"}
        needed = {"apiVersion": _STRING, "kind": _STRING, "metadata": metadata}
        schema = fields(needed | {"spec": _SPECIFICATIONS[version, kind]}) | {"$defs": known}
    return jsonschema.Draft202012Validator(schema)


def problems(manifest: Schema) -> list[str]:
    """A line for each difference between an object and its schema."""
    found = validator(manifest["apiVersion"], manifest["kind"]).iter_errors(manifest)
    return sorted(f"{each.json_path}: {each.message}" for each in found)
