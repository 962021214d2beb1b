"""Recognises jobs that another launcher than ``horovodrun`` has started, by the variables that launchers set.

:data:`LAUNCHERS` is the whole table. If the variables of several launchers are set, the innermost launcher comes first,
because it has started this process: ``mpirun`` in a Slurm job, ``torchrun`` in a step of ``srun`` or under ``mpirun``.
Horovod's own variables take precedence over all launchers: if ``HOROVOD_SIZE`` is set, the table is not used.

A process may have inherited variables that describe another process, so a row may have a function that detects this.
This module opens no connections; :mod:`horoplug.rendezvous.bootstrap.bootstrap` connects the processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from horoplug.rendezvous.bootstrap import slurm, slurm_task

Environment = Mapping[str, str]


class BootstrapAddress(NamedTuple):
    """Where processes without MPI find rank 0."""

    hosts: tuple[str, ...]
    """The hosts on which rank 0 may be; normally one."""
    job: str
    """A name that all ranks of the job share, and no other job or restart of this user has."""
    on_one_host: bool = False
    """Whether all ranks are known to be on this host."""


def _parse_numbers(rank: str, size: str) -> tuple[int, int]:
    return int(rank), int(size)


class Launcher(NamedTuple):
    """A launcher and the variables in which it tells each process its rank."""

    name: str
    rank: str
    size: str
    bootstrap_address: Callable[[Environment], BootstrapAddress] | None
    """Where ranks find rank 0; None: they bootstrap over MPI."""
    also: tuple[str, ...] = ()
    """Further variables that have to be set for the launcher to be recognised."""
    numbers: Callable[[str, str], tuple[int, int]] = _parse_numbers
    """Parses the values of the two variables into rank and size. Errors: ValueError."""
    why_inherited: Callable[[Environment], str] | None = None
    """Returns why the variables describe another process; empty if they describe this process."""

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that are all set in a process of this launcher."""
        return (self.rank, self.size, *self.also)


# ---- where rank 0 is -------------------------------------------------------------------------------------------------


def _of_torch(env: Environment) -> BootstrapAddress:
    # Not MASTER_ADDR: Kubeflow gives rank 0 a different name for its host than the other ranks.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    on_one_host = (
        bool(_get(env, "LOCAL_WORLD_SIZE")) and env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]
    )
    return BootstrapAddress((_need(env, "MASTER_ADDR"),), _job("torchrun", env, names), on_one_host)


def _of_trainer(env: Environment) -> BootstrapAddress:
    names = ("PET_MASTER_ADDR", "PET_MASTER_PORT")
    return BootstrapAddress((_need(env, "PET_MASTER_ADDR"),), _job("Kubeflow Trainer", env, names))


def _of_indexed_job(env: Environment) -> BootstrapAddress:
    # The manifest gives all pods the same address, of the pod with index 0.
    names = ("MASTER_ADDR", "MASTER_PORT")
    return BootstrapAddress((_need(env, "MASTER_ADDR"),), _job("Kubernetes", env, names))


def _of_slurm(env: Environment) -> BootstrapAddress:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    on_one_host = _get(env, "SLURM_STEP_NUM_NODES") == "1"
    hosts = slurm.hosts(_need(env, "SLURM_STEP_NODELIST"))
    return BootstrapAddress((hosts[0],), _job("Slurm", env, names), on_one_host)


def _of_lsf(env: Environment) -> BootstrapAddress:
    on_one_host = _get(env, "JSM_NAMESPACE_LOCAL_SIZE") == env["JSM_NAMESPACE_SIZE"]
    # The first host may be the one of the batch script, on which jsrun starts no rank.
    listed = list(dict.fromkeys(_lsf_hosts(env)))
    if not listed and not on_one_host:
        raise ValueError("neither LSB_MCPU_HOSTS, LSB_HOSTS nor LSB_DJOB_HOSTFILE is set")
    names = ("LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE")
    return BootstrapAddress(tuple(listed[:2]), _job("LSF", env, names), on_one_host)


def _lsf_hosts(env: Environment) -> list[str]:
    listed = _get(env, "LSB_MCPU_HOSTS").split()[::2] or _get(env, "LSB_HOSTS").split()
    file = _get(env, "LSB_DJOB_HOSTFILE")
    if listed or not file:
        return listed
    # For a large job, LSF sets only the file.
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").split()
    except OSError as error:
        raise ValueError(f"LSB_DJOB_HOSTFILE={file}: {error.strerror}") from None


def _of_sagemaker(env: Environment) -> BootstrapAddress:
    return BootstrapAddress(
        (_hosts(env["SM_HOSTS"])[0],), _job("SageMaker", env, ("TRAINING_JOB_NAME",))
    )


def _of_sagemaker_numbers(current: str, hosts: str) -> tuple[int, int]:
    names = _hosts(hosts)
    return names.index(current), len(names)


def _hosts(text: str) -> list[str]:
    found = json.loads(text)
    if not isinstance(found, list) or not found or not all(isinstance(n, str) for n in found):
        raise ValueError("not a list of names")
    return sorted(found, key=lambda name: (len(name), name))  # the same everywhere: algo-2, algo-10


def _of_vertex(env: Environment) -> BootstrapAddress:
    _, hosts = _vertex(env["CLUSTER_SPEC"])
    return BootstrapAddress((hosts[0],), _job("Vertex AI", env, ("CLOUD_ML_JOB_ID",)))


def _of_vertex_numbers(spec: str, _: str) -> tuple[int, int]:
    rank, hosts = _vertex(spec)
    return rank, len(hosts)


def _vertex(spec: str) -> tuple[int, list[str]]:
    """The rank of this replica, and the hosts of all replicas: those of the first pool, which has one, come first."""
    try:
        found = json.loads(spec)
        pools, task = found["cluster"], found["task"]
        names = sorted(pools)
        before = sum(len(pools[name]) for name in names[: names.index(task["type"])])
        hosts = [host.rpartition(":")[0] for name in names for host in pools[name]]
        return before + int(task["index"]), hosts
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a description of a cluster: {error!r}") from None


def _job(kind: str, env: Environment, names: tuple[str, ...]) -> str:
    return " ".join([kind, *(f"{name}={_get(env, name)}" for name in names)])


# ---- the table -------------------------------------------------------------------------------------------------------

LAUNCHERS: Final = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", _of_torch, also=("TORCHELASTIC_RUN_ID",)),
    # Before Open MPI: IBM's MPI, which jsrun starts, sets Open MPI's variables as well.
    Launcher("LSF's jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", _of_lsf),
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None),
    Launcher(
        "mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", None, also=("MPI_LOCALNRANKS",)
    ),
    # Only in a step: the batch script and its own child processes have a SLURM_PROCID, too.
    Launcher(
        "Slurm's srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        _of_slurm,
        also=("SLURM_STEP_ID",),
        why_inherited=slurm_task.why_inherited,
    ),
    # srun --mpi=pmi2, too.
    Launcher(
        "an MPI launcher with PMI",
        "PMI_RANK",
        "PMI_SIZE",
        None,
        why_inherited=slurm_task.why_inherited,
    ),
    # Kubeflow's PyTorchJob, Azure ML, and other launchers for torch.distributed.
    Launcher(
        "a launcher for torch.distributed", "RANK", "WORLD_SIZE", _of_torch, also=("MASTER_ADDR",)
    ),
    Launcher(
        "Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", _of_trainer, also=("PET_MASTER_ADDR",)
    ),
    # One rank in each pod. Kubernetes sets the index only; the manifest sets the other two, as for torch.distributed.
    Launcher(
        "a Kubernetes Job with indexes",
        "JOB_COMPLETION_INDEX",
        "WORLD_SIZE",
        _of_indexed_job,
        also=("MASTER_ADDR",),
    ),
    Launcher(
        "SageMaker", "SM_CURRENT_HOST", "SM_HOSTS", _of_sagemaker, numbers=_of_sagemaker_numbers
    ),
    # Its images for PyTorch set the variables of torch.distributed, too.
    Launcher(
        "Vertex AI",
        "CLUSTER_SPEC",
        "CLUSTER_SPEC",
        _of_vertex,
        also=("CLOUD_ML_JOB_ID",),
        numbers=_of_vertex_numbers,
    ),
)


class LaunchedProcess(NamedTuple):
    """This process, as its launcher describes it."""

    launcher: Launcher
    rank: int
    size: int
    bootstrap_address: BootstrapAddress | None
    """None: the processes bootstrap over MPI."""


def candidates(env: Environment) -> list[Launcher]:
    """All launchers whose variables are set and describe this process, the innermost first."""
    return [each for each in _set(env) if not (each.why_inherited and each.why_inherited(env))]


def inherited(env: Environment) -> str:
    """A warning of one line about variables that describe another process; empty if there are none, or if they describe
    a job of one rank."""
    if not has_own_variables(env):
        for each in _set(env):
            reason = each.why_inherited(env) if each.why_inherited else ""
            if reason and env[each.size].strip() != "1":
                return (
                    f"{each.name} has set {each.rank}={env[each.rank]} and {each.size}={env[each.size]}, but {reason}: "
                    "the variables are ignored (docs/launch-slurm.md)"
                )
    return ""


def _set(env: Environment) -> list[Launcher]:
    return [each for each in LAUNCHERS if all(_get(env, name) for name in each.variables)]


def has_own_variables(env: Environment) -> bool:
    """Whether Horovod's own variables are set: by ``horovodrun``, or by a program that imitates it."""
    return any(_get(env, name) for name in ("HOROPLUG_SIZE", "HOROVOD_SIZE"))


def recognise(env: Environment) -> LaunchedProcess | None:
    """This process as another launcher than ``horovodrun`` describes it; None without one, and for jobs of one process.

    Errors: ValueError with a one-line message if the variables are invalid."""
    found = [] if has_own_variables(env) else candidates(env)
    if not found:
        return None
    launcher = found[0]
    values = env[launcher.rank].strip(), env[launcher.size].strip()
    says = f"{launcher.name} has set {launcher.rank}={values[0]}"
    if launcher.size != launcher.rank:
        says += f" and {launcher.size}={values[1]}"
    remedy = (
        "start the job with horovodrun, or set HOROVOD_RANK, HOROVOD_SIZE ... (docs/launching.md)"
    )
    try:
        rank, size = launcher.numbers(*values)
    except ValueError:
        raise ValueError(f"{says}, which are not a rank and a size; {remedy}") from None
    if not 0 <= rank < size:
        raise ValueError(f"{says}, but ranks are 0 to {size - 1}; {remedy}")
    if size == 1:
        return None
    try:
        return LaunchedProcess(
            launcher,
            rank,
            size,
            launcher.bootstrap_address(env) if launcher.bootstrap_address else None,
        )
    except ValueError as error:
        raise ValueError(f"{says}, but {error}; {remedy}") from None


def _get(env: Environment, name: str) -> str:
    return env.get(name, "").strip()


def _need(env: Environment, name: str) -> str:
    if not _get(env, name):
        raise ValueError(f"{name} is not set")
    return _get(env, name)
