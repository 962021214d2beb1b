"""Complex numbers and 8-bit floats in PyTorch tensors."""

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

DTYPES = ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]

ranks = ranks_fixture("a", "aa", "aab")


def values(rank, dtype):
    small = (torch.arange(700) + rank) % 3
    if dtype.is_complex:
        return torch.complex(small.double(), ((small + rank) % 2).double()).to(dtype)
    return small.float().to(dtype)


def check(name):
    dtype = getattr(torch, name)
    rank, size = hvd.rank(), hvd.size()
    wide = torch.complex128 if dtype.is_complex else torch.float64
    everyone = torch.stack([values(other, dtype).to(wide) for other in range(size)])
    mine = values(rank, dtype)
    total = hvd.allreduce(mine, op=hvd.Sum)
    assert total.dtype == dtype
    assert torch.equal(total.to(wide), everyone.sum(0))
    assert torch.equal(hvd.broadcast(mine, 0).to(wide), everyone[0])
    gathered = hvd.allgather(mine[: rank + 1])
    parts = [everyone[other, : other + 1] for other in range(size)]
    assert torch.equal(gathered.to(wide), torch.cat(parts))
    received, _ = hvd.alltoall(mine[:size], splits=torch.ones(size, dtype=torch.int32))
    assert torch.equal(received.to(wide), everyone[:, rank])


@pytest.mark.parametrize("name", DTYPES)
def test_complex_and_float8_operations(ranks, name):
    if not hasattr(torch, name):
        pytest.skip(f"this PyTorch has no {name}")
    ranks.run(check, name)
