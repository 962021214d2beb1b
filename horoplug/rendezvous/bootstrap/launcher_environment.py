"""Jobs that another launcher than ``horovodrun`` has started: who this process is, and where it finds the others.

:data:`LAUNCHERS` is the whole table. Whoever is innermost has started this very process, and stands first: ``mpirun``
in a job of Slurm, ``torchrun`` in a step of ``srun`` or under ``mpirun``. Variables of Horovod's own are stronger than
all: where ``HOROVOD_SIZE`` is set, nobody else is asked.

Nothing is done here. :mod:`horoplug.rendezvous.bootstrap.bootstrap` brings the processes together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from horoplug.rendezvous.bootstrap import slurm

Environment = Mapping[str, str]


class Place(NamedTuple):
    """Where processes meet that have no MPI."""

    hosts: tuple[str, ...]
    """Where rank 0 may be; normally one."""
    job: str
    """The same for all ranks of a job, and for no other job or attempt of this user's."""
    together: bool = False
    """All ranks are known to be on this host."""


def _two_numbers(rank: str, size: str) -> tuple[int, int]:
    return int(rank), int(size)


class Launcher(NamedTuple):
    """One way to start processes, and the variables in which it tells each of them its place."""

    name: str
    rank: str
    size: str
    place: Callable[[Environment], Place] | None
    """Where they meet; None: over MPI."""
    also: tuple[str, ...] = ()
    """Further variables by which it is known."""
    numbers: Callable[[str, str], tuple[int, int]] = _two_numbers
    """Rank and size from the values of the two variables. ValueError if they are something else."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Those that are all set where it has started a process."""
        return (self.rank, self.size, *self.also)


# ---- where the ranks meet --------------------------------------------------------------------------------------------


def _of_torch(env: Environment) -> Place:
    # Not MASTER_ADDR: Kubeflow gives rank 0 another name for itself than it gives to the others.
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    together = bool(_get(env, "LOCAL_WORLD_SIZE")) and env["LOCAL_WORLD_SIZE"] == env["WORLD_SIZE"]
    return Place((_need(env, "MASTER_ADDR"),), _job("torchrun", env, names), together)


def _of_trainer(env: Environment) -> Place:
    names = ("PET_MASTER_ADDR", "PET_MASTER_PORT")
    return Place((_need(env, "PET_MASTER_ADDR"),), _job("Kubeflow Trainer", env, names))


def _of_slurm(env: Environment) -> Place:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    together = _get(env, "SLURM_STEP_NUM_NODES") == "1"
    hosts = slurm.hosts(_need(env, "SLURM_STEP_NODELIST"))
    return Place((hosts[0],), _job("Slurm", env, names), together)


def _of_lsf(env: Environment) -> Place:
    together = _get(env, "JSM_NAMESPACE_LOCAL_SIZE") == env["JSM_NAMESPACE_SIZE"]
    # The first host may be the one that runs the batch script, on which jsrun starts nothing.
    listed = list(dict.fromkeys(_lsf_hosts(env)))
    if not listed and not together:
        raise ValueError("neither LSB_MCPU_HOSTS, LSB_HOSTS nor LSB_DJOB_HOSTFILE is set")
    names = ("LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE")
    return Place(tuple(listed[:2]), _job("LSF", env, names), together)


def _lsf_hosts(env: Environment) -> list[str]:
    listed = _get(env, "LSB_MCPU_HOSTS").split()[::2] or _get(env, "LSB_HOSTS").split()
    file = _get(env, "LSB_DJOB_HOSTFILE")
    if listed or not file:
        return listed
    # Of a large job, LSF leaves the variables out.
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").split()
    except OSError as error:
        raise ValueError(f"LSB_DJOB_HOSTFILE={file}: {error.strerror}") from None


def _of_sagemaker(env: Environment) -> Place:
    return Place((_hosts(env["SM_HOSTS"])[0],), _job("SageMaker", env, ("TRAINING_JOB_NAME",)))


def _of_sagemaker_numbers(current: str, hosts: str) -> tuple[int, int]:
    names = _hosts(hosts)
    return names.index(current), len(names)


def _hosts(text: str) -> list[str]:
    found = json.loads(text)
    if not isinstance(found, list) or not found or not all(isinstance(n, str) for n in found):
        raise ValueError("no list of names")
    return sorted(found, key=lambda name: (len(name), name))  # the same everywhere: algo-2, algo-10


def _job(kind: str, env: Environment, names: tuple[str, ...]) -> str:
    return " ".join([kind, *(f"{name}={_get(env, name)}" for name in names)])


# ---- the table -------------------------------------------------------------------------------------------------------

LAUNCHERS: Final = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", _of_torch, also=("TORCHELASTIC_RUN_ID",)),
    # Before Open MPI: IBM's MPI, which jsrun starts, sets the variables of that, too.
    Launcher("LSF's jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", _of_lsf),
    Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", None),
    Launcher(
        "mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", None, also=("MPI_LOCALNRANKS",)
    ),
    # Only in a step: the batch script, and what it runs itself, has a SLURM_PROCID, too.
    Launcher(
        "Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _of_slurm, also=("SLURM_STEP_ID",)
    ),
    Launcher("an MPI launcher with PMI", "PMI_RANK", "PMI_SIZE", None),
    # PyTorchJob of Kubeflow, Azure ML, and whoever starts processes for torch.distributed otherwise.
    Launcher(
        "a launcher for torch.distributed", "RANK", "WORLD_SIZE", _of_torch, also=("MASTER_ADDR",)
    ),
    Launcher(
        "Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES", _of_trainer, also=("PET_MASTER_ADDR",)
    ),
    Launcher(
        "SageMaker", "SM_CURRENT_HOST", "SM_HOSTS", _of_sagemaker, numbers=_of_sagemaker_numbers
    ),
)


class Launched(NamedTuple):
    """This process as its launcher has it."""

    launcher: Launcher
    rank: int
    size: int
    place: Place | None
    """None: they meet over MPI."""


def candidates(env: Environment) -> list[Launcher]:
    """All whose variables are set, the innermost first."""
    return [each for each in LAUNCHERS if all(_get(env, name) for name in each.variables)]


def has_own_variables(env: Environment) -> bool:
    """Whether ``horovodrun``, or somebody in its manner, has started this process."""
    return any(_get(env, name) for name in ("HOROPLUG_SIZE", "HOROVOD_SIZE"))


def recognise(env: Environment) -> Launched | None:
    """Who has started this process; None for ``horovodrun``, for nobody, and for jobs of one process.

    Errors: ValueError of one line for variables that make no sense."""
    found = [] if has_own_variables(env) else candidates(env)
    if not found:
        return None
    launcher = found[0]
    values = env[launcher.rank].strip(), env[launcher.size].strip()
    says = f"{launcher.name} has set {launcher.rank}={values[0]} and {launcher.size}={values[1]}"
    remedy = (
        "start the job with horovodrun, or set HOROVOD_RANK, HOROVOD_SIZE ... (docs/launching.md)"
    )
    try:
        rank, size = launcher.numbers(*values)
    except ValueError:
        raise ValueError(f"{says}, which is no rank of any size; {remedy}.") from None
    if not 0 <= rank < size:
        raise ValueError(f"{says}, but ranks are 0 to {size - 1}; {remedy}.")
    if size == 1:
        return None
    try:
        return Launched(launcher, rank, size, launcher.place(env) if launcher.place else None)
    except ValueError as error:
        raise ValueError(f"{says}, but {error}; {remedy}.") from None


def _get(env: Environment, name: str) -> str:
    return env.get(name, "").strip()


def _need(env: Environment, name: str) -> str:
    if not _get(env, name):
        raise ValueError(f"{name} is not set")
    return _get(env, name)
