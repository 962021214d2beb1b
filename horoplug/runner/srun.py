"""The command line and the environment of Slurm's srun, which starts one task on each of the job's other nodes."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence

# fmt: off
# What a task needs to start Python. The other variables of the ranks travel to the agent.
_EXPORTED = [
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "PYTHONPATH", "PYTHONHOME",
    "VIRTUAL_ENV", "CONDA_PREFIX",
]
# Variables of the job and of Slurm's users, without SLURM_, that change what srun does beyond its flags.
_OPTIONS = [
    "BCAST", "CPUS_PER_GPU", "CPUS_PER_TASK", "CPU_BIND", "DEPENDENCY", "DISTRIBUTION", "DIST_PLANESIZE", "EPILOG",
    "EXACT", "EXCLUSIVE", "EXPORT_ENV", "GPUS_PER_TASK", "GPU_BIND", "HINT", "HOSTFILE", "IMMEDIATE", "KILL_BAD_EXIT",
    "LABELIO", "MEM_BIND", "NTASKS_PER_CORE", "NTASKS_PER_GPU", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES", "OPEN_MODE",
    "OVERCOMMIT", "PROLOG", "RESV_PORTS", "SPREAD_JOB", "STDERRMODE", "STDINMODE", "STDOUTMODE", "TASK_EPILOG",
    "TASK_PROLOG", "TEST_EXEC", "THREADS", "THREADS_PER_CORE", "TRES_PER_TASK", "UMASK", "UNBUFFEREDIO", "WAIT",
]
# fmt: on
_OPTIONS_OF_SRUN = ["SRUN_CPUS_PER_TASK", "SRUN_CONTAINER", "SRUN_EXPORT_ENV"]


@dataclasses.dataclass(frozen=True)
class Srun:
    """How to start a process on other nodes of the Slurm job in which the launcher runs."""

    program: str
    python: str
    """Python on the other nodes."""

    def command(self, nodes: Sequence[str], module: str) -> list[str]:
        """The command that runs a module of Python as one task on each node."""
        count = len(nodes)
        return [
            self.program,
            *("--overlap", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0"),
            *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
            f"--nodelist={','.join(nodes)}",
            f"--export={','.join(name for name in _EXPORTED if name in os.environ)}",
            *(self.python, "-X", "utf8", "-m", module),
        ]


def find(env: Mapping[str, str], python: str) -> Srun | None:
    """Slurm's srun; None if it is not on the PATH. ``python``: of the other nodes."""
    program = shutil.which("srun", path=env.get("PATH"))
    return None if program is None else Srun(program, python)


def environment() -> dict[str, str]:
    """The environment of srun: this process's, without the variables that are options of srun."""
    dropped = {*(f"SLURM_{name}" for name in _OPTIONS), *_OPTIONS_OF_SRUN}
    return {name: value for name, value in os.environ.items() if name not in dropped}
