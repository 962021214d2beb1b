"""What Kubernetes' operators make of the manifests in examples/kubernetes: pods with names, variables and files.

Written after the operators' controllers. Each function starts all pods of a job and returns them by rank."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.harness import ROOT
from tests.harness.pods import NAMESPACE, Pod, Pods

FOLDER = ROOT / "examples" / "kubernetes"
Manifest = dict[str, Any]


def manifests(name: str) -> dict[str, Manifest]:
    """The objects of a file, by kind."""
    found = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    return {each["kind"]: each for each in found}


def indexed_job(pods: Pods) -> list[Pod]:
    """A Job with indexed completions. The headless service gives its pods names."""
    objects = manifests("job")
    service, job = objects["Service"], objects["Job"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    return [
        pods.start(
            pod,
            name=f"{job['metadata']['name']}-{index}",
            subdomain=pod["subdomain"],
            env={"JOB_COMPLETION_INDEX": str(index)},
        )
        for index in range(job["spec"]["completions"])
    ]


def job_set(pods: Pods, spec: Mapping[str, Any], name: str, extra: Mapping[str, str]) -> list[Pod]:
    """A JobSet, whose service has the name of the JobSet. ``extra``: variables of all pods, without their rank."""
    (group,) = spec["replicatedJobs"]
    assert group.get("replicas", 1) == 1
    job = group["template"]["spec"]
    return [
        pods.start(
            job["template"]["spec"],
            name=f"{name}-{group['name']}-0-{index}",
            subdomain=spec.get("network", {}).get("subdomain", name),
            env={"JOB_COMPLETION_INDEX": str(index)}
            | {key: text.replace("INDEX", str(index)) for key, text in extra.items()},
        )
        for index in range(job["completions"])
    ]


def jobset(pods: Pods) -> list[Pod]:
    manifest = manifests("jobset")["JobSet"]
    return job_set(pods, manifest["spec"], manifest["metadata"]["name"], {})


def trainer(pods: Pods) -> list[Pod]:
    """Kubeflow Trainer: makes a JobSet of the runtime, with what the TrainJob changes and the variables of torchrun."""
    objects = manifests("trainjob")
    runtime, job = objects["TrainingRuntime"], objects["TrainJob"]
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (
        "TrainingRuntime",
        runtime["metadata"]["name"],
    )
    wanted, name = job["spec"]["trainer"], job["metadata"]["name"]
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = group["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert (group["name"], label) == ("node", "trainer")
    group["template"]["spec"]["completions"] = wanted["numNodes"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container |= {"image": wanted["image"], "command": wanted["command"]}
    variables = {
        "PET_NNODES": str(wanted["numNodes"]),
        "PET_NPROC_PER_NODE": str(wanted["numProcPerNode"]),
        "PET_NODE_RANK": "INDEX",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    return job_set(pods, runtime["spec"]["template"]["spec"], name, variables)


def pytorch_job(pods: Pods) -> list[Pod]:
    """Kubeflow's training operator: a service with the name of each pod."""
    job = manifests("pytorchjob")["PyTorchJob"]
    groups = job["spec"]["pytorchReplicaSpecs"]
    size = sum(group["replicas"] for group in groups.values())
    names = [
        (group["template"]["spec"], f"{job['metadata']['name']}-{kind.lower()}-{index}")
        for kind, group in groups.items()
        for index in range(group["replicas"])
    ]
    common = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": names[0][1],
        "MASTER_PORT": "23456",
        "WORLD_SIZE": str(size),
        "PET_NPROC_PER_NODE": "auto",
        "PET_NNODES": str(size),
        "PET_MASTER_ADDR": names[0][1],
        "PET_MASTER_PORT": "23456",
    }
    return [
        pods.start(
            spec,
            name=name,
            names=(name,),
            env=common | {"RANK": str(rank), "PET_NODE_RANK": str(rank)},
        )
        for rank, (spec, name) in enumerate(names)
    ]


class MpiJob:
    """Kubeflow's MPI operator: workers with an sshd, and a launcher that knows their names and has a key for them."""

    def __init__(self, pods: Pods, manifest: str, workers: int | None = None) -> None:
        """``workers``: another number of replicas than the manifest's."""
        self.pods = pods
        self.job = manifests(manifest)["MPIJob"]
        self.name = self.job["metadata"]["name"]
        groups = self.job["spec"]["mpiReplicaSpecs"]
        self.launcher_spec = groups["Launcher"]["template"]["spec"]
        self.worker_spec = groups["Worker"]["template"]["spec"]
        self.workers = workers or groups["Worker"]["replicas"]
        self._keys = pods.folder / f"{self.name}-ssh"
        self._keys.mkdir()
        self._keys.chmod(0o1777)  # a mounted secret's
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", ""]
        subprocess.run([*command, "-f", self._keys / "id_rsa"], check=True)
        (self._keys / "authorized_keys").write_text((self._keys / "id_rsa.pub").read_text())
        for file in self._keys.iterdir():
            file.chmod(0o644)
        self._etc = pods.folder / f"{self.name}-config"
        self._etc.mkdir()
        hosts = [f"{self.host(index)} slots={self.slots}\n" for index in range(self.workers)]
        (self._etc / "hostfile").write_text("".join(hosts))

    @property
    def slots(self) -> int:
        return int(self.job["spec"]["slotsPerWorker"])

    def host(self, index: int) -> str:
        """The name of a worker, of which one part is the service of the job."""
        return f"{self.name}-worker-{index}.{self.name}.{NAMESPACE}.svc"

    def start_worker(self, index: int) -> Pod:
        """Start a worker, and wait until it is ready."""
        pod = self.pods.start(
            self.worker_spec,
            name=f"{self.name}-worker-{index}",
            subdomain=self.name,
            env={"K_MPI_JOB_ROLE": "worker"},
            mounts=self.mounted_keys,
        )
        self.pods.listening(
            pod, self.worker_spec["containers"][0]["readinessProbe"]["tcpSocket"]["port"]
        )
        self.list_workers()
        return pod

    def list_workers(self) -> None:
        """Write the script with the names of the workers that run."""
        running = sorted(name for name in self.pods.pods if name.startswith(f"{self.name}-worker-"))
        lines = [f"echo {name}.{self.name}.{NAMESPACE}.svc\n" for name in running]
        draft = self._etc / ".draft"
        draft.write_text("".join(["#!/bin/sh\n", *lines]))
        draft.chmod(0o555)
        draft.rename(self._etc / "discover_hosts.sh")  # the kubelet replaces files, too

    def start_launcher(self) -> Pod:
        variables = {
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            "OMPI_MCA_orte_set_default_slots": str(self.slots),
            "NVIDIA_VISIBLE_DEVICES": "",
            "NVIDIA_DRIVER_CAPABILITIES": "",
        }
        return self.pods.start(
            self.launcher_spec,
            name=f"{self.name}-launcher",
            subdomain=self.name,
            env=variables,
            mounts=self.mounted_keys | {"/etc/mpi": self._etc},
        )

    @property
    def mounted_keys(self) -> dict[str, Path]:
        """The operator's secret for the job, by the path at which the pods have it."""
        return {self.job["spec"]["sshAuthMountPath"]: self._keys}
