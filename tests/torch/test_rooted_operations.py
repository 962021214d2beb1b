"""reduce, gather, scatter, send and recv on PyTorch tensors, and the gradients of the first three."""

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab", "aab")


def check_reduce_gradient():
    size, rank = hvd.size(), hvd.rank()
    for root in range(size):
        for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / size)):
            x = torch.full((3, 2), rank + 1.0, requires_grad=True)
            y = hvd.reduce(x, root, op=op, prescale_factor=2.0)
            total = 2 * factor * size * (size + 1) / 2
            torch.testing.assert_close(y, torch.full((3, 2), total if rank == root else rank + 1.0))
            (y * (rank + 1)).sum().backward()
            torch.testing.assert_close(x.grad, torch.full((3, 2), 2 * factor * (root + 1)))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="op=Max has no gradient"):
        hvd.reduce(x, 0, op=hvd.Max).sum().backward()


def check_gather_gradient():
    size, rank = hvd.size(), hvd.rank()
    for root in range(size):
        x = torch.randn(rank + 1, 2, requires_grad=True)
        y = hvd.gather(x, root)
        rows = size * (size + 1) // 2
        assert y.shape == (rows if rank == root else 0, 2)
        (y * torch.arange(len(y) * 2.0).view(-1, 2)).sum().backward()
        start = rank * (rank + 1) // 2
        expected = torch.arange(rows * 2.0).view(-1, 2)[start : start + rank + 1]
        torch.testing.assert_close(x.grad, expected)
    x = torch.tensor(1.0, requires_grad=True)
    hvd.gather(x, 0).sum().backward()
    assert x.grad == 1


def check_scatter_gradient():
    size, rank = hvd.size(), hvd.rank()
    for root in range(size):
        x = torch.randn(size + 2, 3, requires_grad=True)
        y = hvd.scatter(x, root, [1] * size)
        (y * (rank + 1)).sum().backward()
        owners = torch.tensor([*range(1, size + 1), 0, 0]).float() * (rank == root)
        torch.testing.assert_close(x.grad, owners[:, None].expand(-1, 3))


def check_pair():
    size, rank = hvd.size(), hvd.rank()
    handle = hvd.send_async(torch.full((4,), rank, dtype=torch.bfloat16), (rank + 1) % size, tag=3)
    data = torch.empty(4, dtype=torch.bfloat16)
    assert hvd.recv(data, (rank - 1) % size, tag=3) is data
    assert (data == (rank - 1) % size).all()
    assert hvd.synchronize(handle) is None
    wide = torch.zeros(4, 6)  # columns are not dense, so they are received into a copy
    handle = hvd.send_async(torch.full((4, 3), 7.0), rank)
    assert hvd.recv(wide[:, ::2], rank).shape == (4, 3)
    hvd.synchronize(handle)
    assert wide.sum() == 4 * 3 * 7
    x = torch.ones(2, requires_grad=True)
    handle = hvd.recv_async(torch.empty(2), rank)
    assert hvd.send(x * 2, rank) is None
    assert hvd.synchronize(handle).tolist() == [2, 2]


def check_objects():
    size, rank = hvd.size(), hvd.rank()
    if rank == 0:
        for other in range(1, size):
            hvd.send_object({"tensor": torch.full((2,), other)}, other, tag=5)
    else:
        assert hvd.recv_object(0, tag=5)["tensor"].tolist() == [rank, rank]


@pytest.mark.parametrize(
    "check",
    [
        check_reduce_gradient,
        check_gather_gradient,
        check_scatter_gradient,
        check_pair,
        check_objects,
    ],
)
@pytest.mark.short("aa-*")
def test_rooted_and_point_to_point_operations(ranks, check):
    ranks.run(check)
