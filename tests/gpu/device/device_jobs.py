"""Jobs of one and two ranks that share the GPU of this machine."""

import re
from collections.abc import Iterator

import pytest

from horoplug._native import algorithms
from horoplug.runner.diagnosis import gpu
from tests.harness.support import Pool, Ranks
from tests.harness.support import run_script as run_script

# NCCL supports two ranks on one GPU from version 2.30, if this variable is set.
_NCCL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
# For one rank, several hosts (test_several_hosts.py), mpirun (test_mpi.py).
_OTHERS = {"copy", "hierarchical", "mpi"}


def _algorithms() -> list[list[str]]:
    """Name and medium of each algorithm."""
    return [line.split()[1:] for line in algorithms().splitlines()]


# The forced algorithm; None: horoplug chooses.
BACKENDS = (None, *sorted({name for name, medium in _algorithms() if medium == "gpu"} - _OTHERS))


def nccl_obstacle() -> str | None:
    """Why two ranks on one GPU cannot use NCCL here; None if they can."""
    nccl = gpu.lines()[2].strip()
    version = re.match(r"\[X\] NCCL (\d+)\.(\d+)", nccl)
    if version is None:
        return nccl
    return None if tuple(map(int, version.groups())) >= (2, 30) else f"two ranks: {nccl}"


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(
    scope="module",
    params=[(1, None), *((2, backend) for backend in BACKENDS)],
    ids=lambda p: f"{p[0]}-{p[1] or 'auto'}",
)
def ranks(request: pytest.FixtureRequest, gpu_pool: Pool) -> Iterator[Ranks]:
    """A job on the GPU with each algorithm. Skipped if the module's ``need()`` returns a reason."""
    reason = request.module.need()
    if reason:
        pytest.skip(reason)
    size, backend = request.param
    env = {"HOROPLUG_ALGORITHM": backend} if backend else {}
    if backend == "nccl":
        if reason := nccl_obstacle():
            pytest.skip(reason)
        env |= _NCCL
    with gpu_pool.ranks(size, env=env) as job:
        yield job
