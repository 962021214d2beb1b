"""The environments of other launchers' processes, and jobs with these environments. The launchers are not installed.

horoplug recognises a launcher by its variables alone, so processes with exactly these variables replace the
launcher's. All host names resolve to this machine."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.support import environment

Variables = dict[str, str]

JOB = program_text("tests/harness/programs/starters.py")


def srun(size: int, *, nodes: int = 1, step: int = 0, **more: str) -> list[Variables]:
    """Slurm's srun, as of 22.05, without PMI."""
    common = {
        "SLURM_CLUSTER_NAME": "cluster",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NODELIST": f"127.0.0.[1-{nodes}]",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(size),
    }
    return [common | {"SLURM_PROCID": str(rank)} | more for rank in range(size)]


def jsrun(size: int) -> list[Variables]:
    """LSF's jsrun: the first host is that of the batch script and runs no rank."""
    common = {
        "LSB_JOBID": str(os.getpid()),
        "LSB_MCPU_HOSTS": "batch.invalid 1 localhost 4",
        "JSM_NAMESPACE_SIZE": str(size),
        "JSM_NAMESPACE_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_SIZE": str(size),
        "PMIX_NAMESPACE": "1",
    }
    return [
        common | {"JSM_NAMESPACE_RANK": str(rank), "OMPI_COMM_WORLD_RANK": str(rank)}
        for rank in range(size)
    ]


def distributed(size: int, **more: str) -> list[Variables]:
    """Kubeflow's PyTorchJob, Azure ML: one process with the variables of torch.distributed for each rank."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(os.getpid() % 30000)}
    common["WORLD_SIZE"] = str(size)
    return [common | {"RANK": str(rank)} | more for rank in range(size)]


def trainer(size: int) -> list[Variables]:
    """Kubeflow Trainer, without torchrun."""
    common = {
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(os.getpid() % 30000),
        "PET_NNODES": str(size),
        "PET_NPROC_PER_NODE": "1",
    }
    return [common | {"PET_NODE_RANK": str(rank)} for rank in range(size)]


def indexed_job(size: int) -> list[Variables]:
    """A plain Job of Kubernetes, or JobSet: Kubernetes sets the index, and the manifest the other variables."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost"}
    return [common | {"JOB_COMPLETION_INDEX": str(index)} for index in range(size)]


def sagemaker(size: int) -> list[Variables]:
    """SageMaker: one process on each host."""
    names = [f"127.0.0.{number + 1}" for number in range(size)]
    common = {
        "SM_HOSTS": "[" + ",".join(f'"{name}"' for name in names) + "]",
        "TRAINING_JOB_NAME": f"job-{os.getpid()}",
    }
    return [common | {"SM_CURRENT_HOST": name} for name in names]


def vertex(size: int) -> list[Variables]:
    """Vertex AI with an image of the user: one process on each replica, of which the first is a pool of its own."""
    names = [f"127.0.0.{number + 1}:2222" for number in range(size)]
    cluster = {"workerpool0": names[:1], "workerpool1": names[1:]}
    tasks = [("workerpool0", 0), *(("workerpool1", index) for index in range(size - 1))]
    return [
        {
            "CLOUD_ML_JOB_ID": str(os.getpid()),
            "CLUSTER_SPEC": json.dumps(
                {
                    "cluster": cluster,
                    "environment": "cloud",
                    "task": {"type": pool, "index": index},
                }
            ),
        }
        for pool, index in tasks
    ]


STARTERS = {
    starter.__name__: starter
    for starter in (srun, jsrun, distributed, trainer, indexed_job, sagemaker, vertex)
}


def run(
    environments: Sequence[Variables],
    script: str,
    *args: str,
    timeout: float = 40,
    before: Sequence[Sequence[str]] = (),
) -> list[tuple[int, str]]:
    """Run ``python -c script args`` in all environments at the same time. Returns exit code and output of each.
    ``before``: the prefix of each command."""
    processes = []
    with contextlib.ExitStack() as stack:
        for i, variables in enumerate(environments):
            process = subprocess.Popen(
                [*(before[i] if before else ()), sys.executable, "-c", script, *args],
                env=environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + scaled(timeout)
        results = []
        for process in processes:
            try:
                output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                pytest.fail(f"not done after {timeout:g} s", pytrace=False)
            results.append((process.returncode, output))
    return results
