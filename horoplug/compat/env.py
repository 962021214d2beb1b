"""``horovod.runner.common.util.env``: the environment variables that launchers set."""

import os
import re
from typing import Final

LOG_LEVEL_STR: Final = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
KUBEFLOW_MPI_EXEC: Final = "/etc/mpi/kubexec.sh"
IGNORE_REGEXES: Final = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}
"""Patterns of the names of variables that are valid for one process or host only."""


def is_exportable(v: str) -> bool:
    """Whether the variable of this name may be forwarded to processes on other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size as set by horovodrun, Open MPI or MPICH, in this order; (0, 1) without any.

    Raises RuntimeError if only one of the two variables of a launcher is set."""
    for names in (
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        rank, size = map(os.environ.get, names)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"only one of {names[0]} and {names[1]} is set")
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Whether Kubeflow's MPI operator has started the processes."""
    return os.environ.get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC  # noqa: SIM112
