"""The hosts that a scheduler has allocated to the job in which ``horovodrun`` runs.

Used if the command line names no hosts. A slot is the unit that the scheduler counts per host: a task, core or slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from horoplug.rendezvous.bootstrap import slurm, slurm_task
from horoplug.runner.checks import UsageError
from horoplug.runner.hosts.hosts import Host, add_up

from . import flux
from .srun import Srun
from .step_command import StepCommand

Environment = Mapping[str, str]


class Scheduler(NamedTuple):
    """A scheduler, and the variable that identifies its jobs and lists their hosts."""

    name: str
    variable: str
    hosts: Callable[[Environment, str], list[Host]]
    """Parses the environment and the variable's value. Errors: ValueError, OSError."""
    step: type[StepCommand] | None = None
    """Starts agents on the hosts; None: ssh does."""
    why_over: Callable[[Environment], str] | None = None
    """Why the job has ended whose variables these are; empty if it has not."""


def _of_sagemaker(env: Environment, value: str) -> list[Host]:
    names = json.loads(value)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("it must be a list of names")
    slots = env.get("SM_NUM_GPUS", "0")
    return [Host(name, max(1, int(slots) if slots.isdecimal() else 1)) for name in names]


def _of_slurm(env: Environment, value: str) -> list[Host]:
    names = slurm.hosts(value)
    tasks = env.get("SLURM_TASKS_PER_NODE", "")
    counts = slurm.counts(tasks) if tasks else [1] * len(names)
    if len(counts) != len(names):
        raise ValueError(f"SLURM_TASKS_PER_NODE={tasks} is for {len(counts)} hosts")
    return list(map(Host, names, counts))


def _of_words(env: Environment, value: str) -> list[Host]:
    """LSF's ``host 4 host 2``."""
    words = value.split()
    if len(words) % 2:
        raise ValueError("it must be pairs of a host and a number")
    return [Host(name, _count(count)) for name, count in zip(words[::2], words[1::2], strict=True)]


def _of_file(env: Environment, path: str) -> list[Host]:
    """A file with ``host``, ``host slots=4``, ``host:4`` or ``host 4 queue ...`` on each line; hosts may repeat."""
    hosts: list[Host] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.partition("#")[0].split()
            if not words:
                continue
            name, colon, count = words[0].partition(":")
            if not colon:
                count = words[1].removeprefix("slots=") if len(words) > 1 else "1"
            hosts.append(Host(name, _count(count)))
    return hosts


# The operator's launcher pod has the variable of the MPI in use, which names the hostfile.
_KUBEFLOW = "Kubeflow's MPI operator (or another program)"

SCHEDULERS: Final = (
    # These may run their jobs inside the job of another scheduler.
    Scheduler("SageMaker", "SM_HOSTS", _of_sagemaker),
    Scheduler(_KUBEFLOW, "OMPI_MCA_orte_default_hostfile", _of_file),
    Scheduler(_KUBEFLOW, "I_MPI_HYDRA_HOST_FILE", _of_file),
    Scheduler(_KUBEFLOW, "HYDRA_HOST_FILE", _of_file),
    Scheduler("Flux", "FLUX_URI", flux.hosts, flux.Flux),
    Scheduler("Slurm", "SLURM_JOB_NODELIST", _of_slurm, Srun, slurm_task.why_over),
    # LSF leaves the variable out if it would be too long; the file is complete.
    Scheduler("LSF", "LSB_DJOB_HOSTFILE", _of_file),
    Scheduler("LSF", "LSB_MCPU_HOSTS", _of_words),
    Scheduler("PBS", "PBS_NODEFILE", _of_file),
    Scheduler("SGE", "PE_HOSTFILE", _of_file),
)


def allocation(env: Environment) -> list[Host] | None:
    """The hosts of the scheduler's job that this process runs in, each once; None outside of a job.

    Errors: UsageError if the scheduler's variables are invalid."""
    found = scheduler(env)
    return None if found is None else _hosts(found, env)


def why_over(env: Environment) -> str:
    """Why the scheduler's job with the hosts of :func:`allocation` has ended; empty if it has not."""
    found = scheduler(env)
    return "" if found is None or found.why_over is None else found.why_over(env)


def lsf_hosts(env: Environment) -> list[Host]:
    """The hosts of an LSF job on which jsrun starts ranks; empty outside of a job.

    If there are several hosts, the one of the batch script is left out. Errors: those of :func:`allocation`."""
    found = scheduler(env, [each for each in SCHEDULERS if each.name == "LSF"])
    hosts = [] if found is None else _hosts(found, env)
    return hosts[1:] if len(hosts) > 1 and hosts[0].slots == 1 else hosts


def _hosts(found: Scheduler, env: Environment) -> list[Host]:
    value = env[found.variable].strip()
    says = f"{found.name} has set {found.variable}={value[:80]}"
    why = "which names no host"
    try:
        hosts = add_up(found.hosts(env, value))
    except (OSError, ValueError) as error:
        hosts, why = [], f"but: {getattr(error, 'strerror', None) or error}"
    if not hosts:
        raise UsageError(lambda t: f"{says}, {why}; name the hosts with {t.hosts}")
    return hosts


def scheduler(env: Environment, of: Sequence[Scheduler] = SCHEDULERS) -> Scheduler | None:
    """The scheduler whose variable is set; None outside of a job."""
    return next((each for each in of if env.get(each.variable, "").strip()), None)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not a number of processes")
    return int(text)
