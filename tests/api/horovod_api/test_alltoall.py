"""alltoall."""

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import FLOAT_CASES, MOVED_CASES, equal

pytestmark = pytest.mark.shared_job


def outgoing(dtype, ndim):
    """``rank + 1`` rows for each rank, filled with the receiver's rank."""
    rows = [
        torch.full((hvd.rank() + 1, *[2] * (ndim - 1)), r, dtype=dtype) for r in range(hvd.size())
    ]
    return torch.cat(rows)


def incoming(dtype, ndim):
    rows = hvd.size() * (hvd.size() + 1) // 2
    return torch.full((rows, *[2] * (ndim - 1)), hvd.rank(), dtype=dtype)


def even_splits():
    return torch.tensor([hvd.rank() + 1] * hvd.size(), dtype=torch.int32)


def received():
    return torch.arange(1, hvd.size() + 1, dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_alltoall_with_splits(dtype, ndim):
    tensor = outgoing(dtype, ndim)
    output, counts = hvd.alltoall(tensor, even_splits())
    equal(output, incoming(dtype, ndim))
    equal(counts, received())
    equal(tensor, outgoing(dtype, ndim))


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_alltoall_without_splits(dtype, ndim):
    """All ranks get equal parts, and the result is only the tensor."""
    output = hvd.alltoall(outgoing(dtype, ndim))
    assert isinstance(output, torch.Tensor)
    equal(output, incoming(dtype, ndim))


@pytest.mark.parametrize("kind", ["int32", "int64", "list", "tuple"])
def test_splits_may_be_tensors_lists_or_tuples(kind):
    splits = even_splits().long() if kind == "int64" else even_splits()
    splits = {"list": list, "tuple": tuple}.get(kind, lambda s: s)(
        splits.tolist() if kind in ("list", "tuple") else splits
    )
    output, counts = hvd.alltoall(outgoing(torch.float32, 2), splits=splits, name="splits")
    equal(output, incoming(torch.float32, 2))
    assert counts.tolist() == received().tolist()


@pytest.mark.parametrize("given", [True, False])
def test_alltoall_async_returns_received_splits(given):
    handle = hvd.alltoall_async(
        outgoing(torch.float32, 1), even_splits() if given else None, name="a"
    )
    assert isinstance(handle, int)
    output, counts = hvd.synchronize(handle)
    equal(output, incoming(torch.float32, 1))
    equal(counts, received())


def test_alltoall_with_uneven_splits():
    """Rank s sends s + r rows to rank r."""
    rank, size = hvd.rank(), hvd.size()
    splits = [rank + r for r in range(size)]
    tensor = torch.cat([torch.full((n, 3), 10.0 * rank + r) for r, n in enumerate(splits)])
    output, counts = hvd.alltoall(tensor, splits)
    assert counts.tolist() == [s + rank for s in range(size)]
    equal(output, torch.cat([torch.full((s + rank, 3), 10.0 * s + rank) for s in range(size)]))


def test_alltoall_with_zero_splits():
    """All rows go to rank 0, or no rows are sent at all."""
    rank, size = hvd.rank(), hvd.size()
    output, counts = hvd.alltoall(torch.full((2, 3), rank), [2] + [0] * (size - 1))
    assert counts.tolist() == [2 if rank == 0 else 0] * size
    assert output.shape == (2 * size if rank == 0 else 0, 3)
    output, counts = hvd.alltoall(torch.empty(0, 4), [0] * size)
    assert output.shape == (0, 4)
    assert counts.tolist() == [0] * size
    assert hvd.alltoall(torch.empty(0, 4)).shape == (0, 4)


def test_alltoall_refuses_different_dtypes():
    tensor = torch.ones(hvd.size(), dtype=torch.int32 if hvd.rank() % 2 else torch.float32)
    with pytest.raises(RuntimeError):
        hvd.alltoall(tensor)


def test_alltoall_refuses_different_trailing_dimensions():
    with pytest.raises(RuntimeError):
        hvd.alltoall(torch.ones(2 * hvd.size(), 10 * (hvd.rank() + 1), 2))


def test_alltoall_refuses_indivisible_rows():
    with pytest.raises(ValueError, match=r"\S"):
        hvd.alltoall(torch.empty(hvd.size() + 1))


def test_alltoall_refuses_splits_beyond_the_rows():
    with pytest.raises(ValueError, match=r"\S"):
        hvd.alltoall(torch.empty(hvd.size() - 1), torch.ones(hvd.size(), dtype=torch.int32))


def test_alltoall_refuses_a_wrong_number_of_splits():
    with pytest.raises(ValueError, match=r"\S"):
        hvd.alltoall(torch.empty(2 * hvd.size()), [1] * (hvd.size() + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_alltoall_refuses_non_integer_splits(dtype):
    with pytest.raises(ValueError, match="splits"):
        hvd.alltoall(torch.empty(hvd.size()), torch.ones(hvd.size(), dtype=dtype))


def test_alltoall_refuses_negative_splits():
    with pytest.raises(ValueError, match=r"\S"):
        hvd.alltoall(torch.empty(hvd.size()), [-1] + [1] * (hvd.size() - 1))


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
@pytest.mark.parametrize("given", [True, False])
def test_alltoall_gradient(dtype, ndim, given):
    """The gradient of a row returns to the rank that sent the row."""
    tensor = outgoing(dtype, ndim).requires_grad_()
    if given:
        output, counts = hvd.alltoall(tensor, even_splits())
        assert not counts.requires_grad
    else:
        output = hvd.alltoall(tensor)
    output.backward(torch.ones_like(output))
    equal(tensor.grad, torch.ones_like(tensor))
