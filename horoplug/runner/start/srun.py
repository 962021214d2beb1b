"""The command line and the environment of Slurm's srun, which starts one task on each of the job's other nodes."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

from .step_command import EXPORTED, StepCommand

# fmt: off
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
class Srun(StepCommand):
    """Slurm's srun."""

    program_name = name = "srun"
    task_ended = re.compile(r"srun: error: (\S+): tasks? .*\bcode\b")
    cancelled = "CANCELLED"
    node_variable = "SLURMD_NODENAME"

    def command(self, nodes: Sequence[str], module: str) -> list[str]:
        count = len(nodes)
        return [
            self.program,
            *("--overlap", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=0"),
            *(f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
            f"--nodelist={','.join(nodes)}",
            f"--export={','.join(name for name in EXPORTED if name in os.environ)}",
            *(self.python, "-X", "utf8", "-m", module),
        ]

    def environment(self) -> dict[str, str]:
        """This process's, without the variables that are options of srun."""
        dropped = {*(f"SLURM_{name}" for name in _OPTIONS), *_OPTIONS_OF_SRUN}
        return {name: value for name, value in os.environ.items() if name not in dropped}
