"""reducescatter and grouped_reducescatter."""

import itertools

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import NDIMS, REDUCED, REDUCED_CASES, equal, scaled, times, whole
from tests.api.horovod_api.operations import submit_without_last_rank

pytestmark = pytest.mark.shared_job

FACTORS = [0.9296160928171479, 0.3163755545817859, 2.5]
GRADIENT_CASES = list(itertools.product([torch.float16, torch.float32, torch.float64], NDIMS))


def block(dtype, ndim, seed=1234):
    """4 rows for every rank."""
    return whole(dtype, *[hvd.size() * 4] * ndim, seed=seed)


def mine(tensor):
    return tensor[hvd.rank() * 4 : (hvd.rank() + 1) * 4]


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_reducescatter_sum(dtype, ndim):
    tensor = block(dtype, ndim)
    equal(hvd.reducescatter(tensor, op=hvd.Sum), times(mine(tensor), hvd.size()))
    equal(tensor, block(dtype, ndim))


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_reducescatter_averages_by_default(dtype, ndim):
    tensor = block(dtype, ndim)
    output = hvd.reducescatter(tensor)
    torch.testing.assert_close(
        output, mine(tensor), rtol=1e-6 if dtype.is_floating_point else 0, atol=0
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 7])
def test_reducescatter_of_uneven_rows(rows):
    """The first ``rows % size`` ranks get one row more."""
    size, rank = hvd.size(), hvd.rank()
    tensor = torch.arange(rows * 3.0).reshape(rows, 3)
    counts = [rows // size + (r < rows % size) for r in range(size)]
    start = sum(counts[:rank])
    equal(hvd.reducescatter(tensor, op=hvd.Sum), tensor[start : start + counts[rank]] * size)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_reducescatter_prescale_factor(dtype, ndim):
    for factor in FACTORS:
        tensor = block(dtype, ndim)
        output = hvd.reducescatter(tensor, op=hvd.Sum, prescale_factor=factor)
        equal(output, times(scaled(mine(tensor), factor), hvd.size()))


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_reducescatter_postscale_factor(dtype, ndim):
    for factor in FACTORS:
        tensor = block(dtype, ndim)
        output = hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=factor)
        equal(output, scaled(times(mine(tensor), hvd.size()), factor))


def test_many_reducescatters_in_flight():
    tensors = [block(dtype, ndim) for dtype, ndim in REDUCED_CASES]
    handles = submit_without_last_rank(
        lambda: [hvd.reducescatter_async(tensor, op=hvd.Sum) for tensor in tensors]
    )
    for handle, tensor in zip(handles, tensors, strict=True):
        equal(hvd.synchronize(handle), times(mine(tensor), hvd.size()))


def test_reducescatter_positional_arguments():
    """(tensor, name, compression, op), and (tensor, name, op) for the async variant."""
    tensor = block(torch.float32, 1)
    output = hvd.reducescatter(tensor, "positional", hvd.Compression.fp16, hvd.Sum)
    equal(output, mine(tensor) * hvd.size())
    handle = hvd.reducescatter_async(tensor, "positional", hvd.Sum, hvd.global_process_set)
    equal(hvd.synchronize(handle), mine(tensor) * hvd.size())


def test_reducescatter_refuses_scalars():
    with pytest.raises((ValueError, RuntimeError)):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises((ValueError, RuntimeError)):
        hvd.grouped_reducescatter([torch.zeros(3, 1), torch.tensor(1.0)])


@pytest.mark.parametrize("dtype", REDUCED)
def test_reducescatter_refuses_adasum(dtype):
    with pytest.raises(RuntimeError, match="Adasum"):
        hvd.reducescatter(block(dtype, 1), op=hvd.Adasum)


def test_reducescatter_refuses_different_shapes():
    with pytest.raises(RuntimeError):
        hvd.reducescatter(torch.ones([17 + hvd.rank()] * 3), name="sizes")
    shape = (17, 23 * 57) if hvd.rank() == 0 else (17, 23, 57)
    with pytest.raises(RuntimeError):
        hvd.reducescatter(torch.ones(shape), name="ndim")


def test_reducescatter_refuses_different_dtypes():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    with pytest.raises(RuntimeError):
        hvd.reducescatter(torch.ones(17, dtype=dtype))


@pytest.mark.parametrize(("dtype", "ndim"), GRADIENT_CASES)
@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("grouped", [False, True])
def test_reducescatter_gradient(dtype, ndim, op, grouped):
    tensors = [block(dtype, ndim, seed).requires_grad_() for seed in range(5 if grouped else 1)]
    outputs = (
        hvd.grouped_reducescatter(tensors, op=getattr(hvd, op))
        if grouped
        else [hvd.reducescatter(tensors[0], op=getattr(hvd, op))]
    )
    for output in outputs:
        output.backward(torch.ones_like(output))
    for tensor in tensors:
        equal(tensor.grad, torch.full_like(tensor, hvd.size() if op == "Sum" else 1))


def test_reducescatter_gradient_of_uneven_rows():
    tensor = torch.ones(hvd.size() + 1, 2, requires_grad=True)
    output = hvd.reducescatter(tensor, op=hvd.Sum)
    output.backward(torch.full_like(output, 1.0 + hvd.rank()))
    rows = [2, *[1] * (hvd.size() - 1)]
    expected = torch.cat([torch.full((n, 2), (1.0 + r) * hvd.size()) for r, n in enumerate(rows)])
    equal(tensor.grad, expected)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_grouped_reducescatter(dtype, ndim, op):
    tensors = [block(dtype, ndim, seed) for seed in range(5)]
    outputs = hvd.grouped_reducescatter(tensors, op=getattr(hvd, op))
    assert len(outputs) == 5
    tolerance = 1e-6 if dtype.is_floating_point else 0
    for output, tensor in zip(outputs, tensors, strict=True):
        expected = times(mine(tensor), hvd.size()) if op == "Sum" else mine(tensor)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", REDUCED)
def test_grouped_reducescatter_scale_factors(dtype):
    tensors = [block(dtype, 2, seed) for seed in range(5)]
    for factor in FACTORS:
        outputs = hvd.grouped_reducescatter(tensors, op=hvd.Sum, prescale_factor=factor)
        for output, tensor in zip(outputs, tensors, strict=True):
            equal(output, times(scaled(mine(tensor), factor), hvd.size()))
        outputs = hvd.grouped_reducescatter(tensors, op=hvd.Sum, postscale_factor=factor)
        for output, tensor in zip(outputs, tensors, strict=True):
            equal(output, scaled(times(mine(tensor), hvd.size()), factor))


def test_grouped_reducescatter_async():
    tensors = [block(torch.float32, ndim) for ndim in NDIMS]
    handle = hvd.grouped_reducescatter_async(tensors, name="group", op=hvd.Sum)
    for output, tensor in zip(hvd.synchronize(handle), tensors, strict=True):
        equal(output, mine(tensor) * hvd.size())
