"""Jobs of one and two ranks that share the card of this machine, for frameworks' tensors on it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from support import ROOT, Pool, Ranks  # noqa: E402
from support import run_script as run_script  # noqa: E402

from horoplug._native import algorithms  # noqa: E402

_ALONE = {"copy", "nccl"}


def _algorithms() -> list[list[str]]:
    """Name and medium of each."""
    return [line.split()[1:] for line in algorithms().splitlines()]


_PATHS = [str(ROOT), str(TESTS / "gpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
# What carries the data between ranks; None: what horoplug chooses. (NCCL refuses two ranks on one card.)
BACKENDS = (None, *sorted({name for name, medium in _algorithms() if medium == "gpu"} - _ALONE))


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Pool]:
    pool = Pool(variables={"PYTHONPATH": os.pathsep.join(_PATHS)})
    yield pool
    pool.close()


@pytest.fixture(
    scope="module",
    params=[(1, None), *((2, backend) for backend in BACKENDS)],
    ids=lambda p: f"{p[0]}-{p[1] or 'auto'}",
)
def ranks(request: pytest.FixtureRequest, gpu_pool: Pool) -> Iterator[Ranks]:
    """A job on the card, for each way in which its ranks can reach each other. Skipped as the module's ``need()``
    says."""
    reason = request.module.need()
    if reason:
        pytest.skip(reason)
    size, backend = request.param
    env = {"HOROPLUG_ALGORITHM": backend} if backend else {}
    with gpu_pool.ranks(size, env=env) as job:
        yield job
