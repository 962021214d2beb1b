"""Process groups of ``torch.distributed`` on the ranks of a pool.

groups = process_groups("aa", "aab")  # the fixture of a test module

def test_barrier(groups):
    groups.run(lambda: dist.barrier())
"""

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.support import Pool, Ranks

SECONDS = 30.0  # the time limit of a group, unless the test says otherwise
_numbers = itertools.count()


def new_file(folder: Path) -> str:
    """A file for a FileStore that no other group uses."""
    return str(folder / f"store-{next(_numbers)}")


def begin(file: str, backend: str | None = "horoplug", seconds: float = SECONDS) -> None:
    """On every rank: create the default group."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    # PyTorch counts groups, also those that an earlier test could not create; the number is a part of the store's keys.
    dist.distributed_c10d._world.group_count = 0
    store = dist.FileStore(file, size)
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def end() -> None:
    """On every rank: destroy all groups."""
    if dist.is_initialized():
        dist.destroy_process_group()


def process_groups(*places: str, backend: str | None = "horoplug") -> Any:
    """The fixture ``groups`` of a module: for each string of hosts, as in :meth:`Pool.ranks`, a job whose ranks have a
    default group."""

    @pytest.fixture(scope="module", params=places)
    def groups(
        request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Ranks]:
        with pool.ranks(len(request.param), hosts=request.param, init=False) as ranks:
            ranks.run(begin, new_file(tmp_path_factory.mktemp("groups")), backend)
            yield ranks
            if all(worker.process.poll() is None for worker in ranks.workers):
                ranks.run(end)

    return groups
