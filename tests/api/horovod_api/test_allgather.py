"""allgather and grouped_allgather."""

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import FLOAT_CASES, MOVED_CASES, equal
from tests.api.horovod_api.operations import submit_without_last_rank

pytestmark = pytest.mark.shared_job

ROWS = [17, 32, 81, 12, 15, 23, 22]
FEW_ROWS = [3, 2, 7, 4, 6, 8, 10]


def filled(dtype, ndim, rank, rows=17):
    return torch.full((rows, *[17] * (ndim - 1)), rank, dtype=dtype)


def check_rows(gathered, dtype, ndim, rows):
    """Check that the result has ``rows[r]`` rows with the value r of each rank, in rank order."""
    expected = [filled(dtype, ndim, rank, count) for rank, count in enumerate(rows)]
    equal(gathered, torch.cat(expected))


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_allgather_of_equal_row_counts(dtype, ndim):
    tensor = filled(dtype, ndim, hvd.rank())
    check_rows(hvd.allgather(tensor), dtype, ndim, [17] * hvd.size())
    equal(tensor, filled(dtype, ndim, hvd.rank()))


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_allgather_of_different_row_counts(dtype, ndim):
    rows = ROWS[: hvd.size()]
    gathered = hvd.allgather(filled(dtype, ndim, hvd.rank(), rows[hvd.rank()]))
    check_rows(gathered, dtype, ndim, rows)


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_grouped_allgather(dtype, ndim):
    rows = ROWS[: hvd.size()]
    outputs = hvd.grouped_allgather([filled(dtype, ndim, hvd.rank(), rows[hvd.rank()])] * 5)
    assert len(outputs) == 5
    for output in outputs:
        check_rows(output, dtype, ndim, rows)


def test_allgather_of_empty_tensors():
    """Some or all ranks have no rows, or another dimension has size 0."""
    rows = [rank % 2 * 3 for rank in range(hvd.size())]
    check_rows(
        hvd.allgather(filled(torch.float32, 2, hvd.rank(), rows[hvd.rank()])),
        torch.float32,
        2,
        rows,
    )
    assert hvd.allgather(torch.empty(0, 5)).shape == (0, 5)
    assert hvd.allgather(torch.empty(0)).shape == (0,)
    assert hvd.allgather(torch.empty(2, 0)).shape == (2 * hvd.size(), 0)


def test_allgather_counts_a_scalar_as_one_row():
    equal(hvd.allgather(torch.tensor(float(hvd.rank()))), torch.arange(float(hvd.size())))


def test_many_allgathers_in_flight():
    tensors = [filled(dtype, ndim, hvd.rank()) for dtype, ndim in MOVED_CASES]
    handles = submit_without_last_rank(lambda: [hvd.allgather_async(t) for t in tensors])
    for handle, (dtype, ndim) in zip(handles, MOVED_CASES, strict=True):
        check_rows(hvd.synchronize(handle), dtype, ndim, [17] * hvd.size())


def test_grouped_allgather_async():
    rows = ROWS[: hvd.size()]
    tensors = [filled(torch.float32, ndim, hvd.rank(), rows[hvd.rank()]) for ndim in (1, 2, 3)]
    handle = hvd.grouped_allgather_async(tensors, name="group")
    for ndim, output in enumerate(hvd.synchronize(handle), 1):
        check_rows(output, torch.float32, ndim, rows)


def test_allgather_output_belongs_to_the_caller():
    """The output is writable and outlives the handle of the operation."""
    first = hvd.allgather(torch.full((2,), hvd.rank()))
    first += 1
    second = hvd.allgather(torch.full((2,), hvd.rank()))
    equal(first, second + 1)


def test_allgather_refuses_different_trailing_dimensions():
    with pytest.raises(RuntimeError):
        hvd.allgather(torch.ones(17, 10 * (hvd.rank() + 1), 17))
    equal(hvd.allgather(torch.ones(1)), torch.ones(hvd.size()))


def test_allgather_refuses_different_ndim():
    with pytest.raises(RuntimeError):
        hvd.allgather(torch.ones([3] * (1 + (hvd.rank() > 0))))


def test_allgather_refuses_different_dtypes():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    with pytest.raises(RuntimeError):
        hvd.allgather(torch.ones(17, 17, dtype=dtype))


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
@pytest.mark.parametrize("grouped", [False, True])
def test_allgather_gradient(dtype, ndim, grouped):
    """The gradient is the average over the ranks of the gradients of this rank's rows."""
    rank, rows = hvd.rank(), FEW_ROWS[: hvd.size()]
    tensors = [
        filled(dtype, ndim, rank, rows[rank]).requires_grad_() for _ in range(5 if grouped else 1)
    ]
    outputs = hvd.grouped_allgather(tensors) if grouped else [hvd.allgather(tensors[0])]
    back = torch.cat([filled(dtype, ndim, r, count) for r, count in enumerate(rows)])
    for output in outputs:
        output.backward(back)
    for tensor in tensors:
        expected = filled(dtype, ndim, rank, rows[rank])
        torch.testing.assert_close(tensor.grad, expected, rtol=0, atol=1e-8)


def test_allgather_gradient_with_different_losses():
    tensor = torch.ones(2, requires_grad=True)
    hvd.allgather(tensor).sum().mul(1.0 + hvd.rank()).backward()
    average = sum(1.0 + rank for rank in range(hvd.size())) / hvd.size()
    torch.testing.assert_close(tensor.grad, torch.full((2,), average))
