"""allreduce and grouped_allreduce."""

import contextlib
import warnings

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import (
    FLOAT_CASES,
    INTEGERS,
    REDUCED,
    REDUCED_CASES,
    cube,
    equal,
    scaled,
    times,
    whole,
)
from tests.api.horovod_api.operations import submit_without_last_rank

pytestmark = pytest.mark.shared_job

FACTORS = [0.1915194503788923, 0.6221087710398319, 2.5, -0.75]


def ranks_tensors(dtype, ndim):
    """A different tensor for each rank, with values small enough for a product of three."""
    return [cube(dtype, ndim, seed) for seed in range(hvd.size())]


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_allreduce_sum(dtype, ndim):
    tensor = cube(dtype, ndim)
    kept = tensor.clone()
    equal(hvd.allreduce(tensor, op=hvd.Sum), times(tensor, hvd.size()))
    equal(tensor, kept)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_allreduce_average_of_equal_tensors(dtype, ndim):
    tensor = cube(dtype, ndim)
    averaged = hvd.allreduce(tensor)
    assert averaged.dtype == dtype
    torch.testing.assert_close(
        averaged, tensor, rtol=1e-6 if dtype.is_floating_point else 0, atol=0
    )


@pytest.mark.parametrize("dtype", INTEGERS)
def test_allreduce_average_truncates_integers(dtype):
    """The quotient is truncated towards zero, also for negative sums."""
    tensor = torch.arange(-10, 11, dtype=dtype)
    mine = tensor if hvd.rank() == 0 else torch.zeros_like(tensor)
    equal(hvd.allreduce(mine), tensor.div(hvd.size(), rounding_mode="trunc"))


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
@pytest.mark.parametrize("op", ["Min", "Max"])
def test_allreduce_min_and_max(dtype, ndim, op):
    tensors = torch.stack(ranks_tensors(dtype, ndim))
    expected = getattr(tensors, op.lower())(0).values
    equal(hvd.allreduce(tensors[hvd.rank()], op=getattr(hvd, op)), expected)


@pytest.mark.parametrize(
    ("dtype", "ndim"), [case for case in REDUCED_CASES if case[0] != torch.float16]
)
def test_allreduce_product(dtype, ndim):
    tensors = torch.stack(ranks_tensors(dtype, ndim))
    expected = tensors.prod(0).to(dtype)
    equal(hvd.allreduce(tensors[hvd.rank()], op=hvd.Product), expected)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_allreduce_in_place(dtype, ndim):
    tensor = cube(dtype, ndim)
    expected = times(tensor, hvd.size())
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    equal(tensor, expected)


def test_allreduce_async_results_and_identity():
    tensor = torch.arange(5.0) + hvd.rank()
    expected = sum(torch.arange(5.0) + r for r in range(hvd.size()))
    handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="a")
    assert isinstance(handle, int)
    output = hvd.synchronize(handle)
    assert output is not tensor
    equal(output, expected)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    assert hvd.synchronize(handle) is tensor
    equal(tensor, expected)


@pytest.mark.parametrize("variant", ["allreduce_async", "allreduce_async_"])
def test_many_allreduces_in_flight(variant):
    tensors = [cube(dtype, ndim) for dtype, ndim in REDUCED_CASES]
    expected = [times(tensor, hvd.size()) for tensor in tensors]
    allreduce = getattr(hvd, variant)
    handles = submit_without_last_rank(lambda: [allreduce(t, op=hvd.Sum) for t in tensors])
    for handle, sums in zip(handles, expected, strict=True):
        equal(hvd.synchronize(handle), sums)


def test_allreduces_match_by_name_in_any_order():
    """Calls match by name, not by order."""
    order = list(range(10))
    if hvd.rank() % 2:
        order.reverse()
    handles = {n: hvd.allreduce_async(torch.tensor([n]), op=hvd.Sum, name=f"n{n}") for n in order}
    for n, handle in handles.items():
        assert hvd.synchronize(handle).item() == n * hvd.size()


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_prescale_factor_applies_before_the_sum(dtype, ndim):
    """Each rank's scaled tensor is rounded to the dtype before the sum."""
    for factor in FACTORS:
        tensor = cube(dtype, ndim)
        output = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=factor)
        equal(output, times(scaled(tensor, factor), hvd.size()))


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_postscale_factor_applies_after_the_sum(dtype, ndim):
    for factor in FACTORS:
        tensor = cube(dtype, ndim)
        output = hvd.allreduce(tensor, op=hvd.Sum, postscale_factor=factor)
        equal(output, scaled(times(tensor, hvd.size()), factor))


@pytest.mark.parametrize("variant", ["allreduce_", "allreduce_async", "allreduce_async_"])
def test_scale_factors_in_every_variant(variant):
    tensor = cube(torch.float64, 1)
    output = getattr(hvd, variant)(
        tensor.clone(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
    )
    output = hvd.synchronize(output) if isinstance(output, int) else output
    equal(output, tensor * hvd.size() * 2)


def test_scale_factors_with_average():
    tensor = torch.full((3,), 6.0)
    output = hvd.allreduce(tensor, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(output, torch.full((3,), 12.0))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (1, 1, 1, 1, 1)])
def test_allreduce_of_every_shape(shape):
    equal(hvd.allreduce(torch.ones(shape), op=hvd.Sum), torch.full(shape, float(hvd.size())))


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_allreduce_positional_arguments():
    """(tensor, average, name, op) for the variants without compression."""
    tensor = torch.IntTensor([1])
    assert hvd.allreduce_(tensor, None, "positional", hvd.Sum) == hvd.size()
    tensor = torch.IntTensor([1])
    handle = hvd.allreduce_async(
        tensor, None, "positional", hvd.Sum, 1.0, 1.0, hvd.global_process_set
    )
    assert hvd.synchronize(handle) == hvd.size()
    compressed = hvd.allreduce(torch.ones(1), None, "positional", hvd.Compression.fp16, hvd.Sum)
    assert compressed == hvd.size()
    assert compressed.dtype == torch.float32


@pytest.mark.parametrize(
    "variant", ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
)
@pytest.mark.parametrize("average", [True, False])
def test_average_argument_is_deprecated_and_works(variant, average):
    tensor = torch.full((2,), 3.0)
    with pytest.warns(DeprecationWarning, match="average"):
        output = getattr(hvd, variant)(tensor.clone(), average=average, name="shim")
    output = hvd.synchronize(output) if isinstance(output, int) else output
    torch.testing.assert_close(output, tensor if average else tensor * hvd.size())


@pytest.mark.parametrize("variant", ["grouped_allreduce", "grouped_allreduce_"])
def test_average_argument_of_grouped_allreduce(variant):
    with pytest.warns(DeprecationWarning, match="average"):
        outputs = getattr(hvd, variant)([torch.ones(2)], average=False)
    equal(outputs[0], torch.full((2,), float(hvd.size())))


def test_op_argument_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
        hvd.allreduce(torch.ones(1))


@pytest.mark.parametrize("average", [True, False])
def test_average_and_op_together_are_refused(average):
    with pytest.raises(ValueError, match="op"):
        hvd.allreduce(torch.ones(1), average=average, op=hvd.Sum)
    with pytest.raises(ValueError, match="op"):
        hvd.grouped_allreduce([torch.ones(1)], average=average, op=hvd.Average)


@pytest.mark.parametrize("grouped", [False, True])
def test_strided_tensors_in_place(grouped):
    """Horovod raises ValueError; horoplug's result must be correct, and memory between the elements unchanged."""
    square = torch.arange(16.0).reshape(4, 4)
    expected = square.clone()
    expected[:, ::2] *= hvd.size()
    with contextlib.suppress(ValueError):
        if grouped:
            hvd.grouped_allreduce_([square[:, ::2]], op=hvd.Sum)
        else:
            hvd.allreduce_(square[:, ::2], op=hvd.Sum)
        equal(square, expected)


def test_allreduce_of_strided_tensors():
    equal(
        hvd.allreduce(torch.arange(16.0).reshape(4, 4).t(), op=hvd.Max),
        torch.arange(16.0).reshape(4, 4).t(),
    )


def test_unsupported_dtype_is_refused():
    with pytest.raises(ValueError, match=r"float8_e4m3fnuz"):
        hvd.allreduce(torch.ones(2, dtype=torch.float8_e4m3fnuz))


# ---- mismatches -----------------------------------------------------------------------------------------------------


def check_disagreement(*tensors):
    """``tensors``: of rank 0 and of the others. Check that every rank gets an error and the job continues."""
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(tensors[min(hvd.rank(), 1)], name="disagreement")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="disagreement") == hvd.size()


def test_different_sizes_are_an_error_on_every_rank():
    check_disagreement(torch.ones(17, 17, 17), torch.ones(18, 18, 18))
    with pytest.raises(RuntimeError):
        hvd.allreduce(torch.ones([17 + hvd.rank()] * 3))


def test_different_ndim_is_an_error_on_every_rank():
    check_disagreement(torch.ones(17, 23 * 57), torch.ones(17, 23, 57))


def test_different_dtypes_are_an_error_on_every_rank():
    check_disagreement(torch.ones(17, dtype=torch.int32), torch.ones(17, dtype=torch.float32))


def test_different_ops_are_an_error_on_every_rank():
    with pytest.raises(RuntimeError):
        hvd.allreduce(torch.ones(3), op=hvd.Sum if hvd.rank() == 0 else hvd.Average, name="ops")


def test_different_scale_factors_are_an_error_on_every_rank():
    with pytest.raises(RuntimeError):
        hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=1.0 + hvd.rank(), name="scaling")


def test_different_operations_may_share_a_name():
    """Calls match by operation and name, as in Horovod."""
    handles = [
        hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="shared"),
        hvd.allgather_async(torch.ones(2), name="shared"),
        hvd.broadcast_async(torch.ones(2), 0, name="shared"),
    ]
    sums, gathered, sent = (hvd.synchronize(handle) for handle in handles)
    equal(sums, torch.full((2,), float(hvd.size())))
    equal(gathered, torch.ones(2 * hvd.size()))
    equal(sent, torch.ones(2))


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_allreduce_gradient(dtype, ndim, op):
    tensor = cube(dtype, ndim).requires_grad_()
    output = hvd.allreduce(tensor, op=getattr(hvd, op))
    output.backward(torch.ones_like(output))
    expected = torch.full_like(output, hvd.size() if op == "Sum" else 1)
    torch.testing.assert_close(tensor.grad, expected, rtol=0, atol=1e-8)


def test_allreduce_gradient_with_scale_factors():
    tensor = torch.ones(4, requires_grad=True)
    output = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    output.backward(torch.ones(4))
    torch.testing.assert_close(tensor.grad, torch.full((4,), 1.5 * hvd.size()))


def test_allreduce_gradient_is_reduced_over_ranks():
    tensor = torch.ones(4, requires_grad=True)
    hvd.allreduce(tensor, op=hvd.Sum).backward(torch.full((4,), 1.0 + hvd.rank()))
    equal(tensor.grad, torch.full((4,), float(sum(range(1, hvd.size() + 1)))))


@pytest.mark.parametrize("average", [True, False])
def test_allreduce_gradient_with_the_average_argument(average):
    tensor = torch.ones(4, requires_grad=True)
    with pytest.warns(DeprecationWarning, match="average"):
        output = hvd.allreduce(tensor, average=average)
    output.backward(torch.ones(4))
    torch.testing.assert_close(tensor.grad, torch.full((4,), 1.0 if average else float(hvd.size())))


def test_compression_keeps_dtype_and_gradient_of_allreduce():
    tensor = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    output = hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert output.dtype == torch.float64
    output.backward(torch.ones(4, dtype=torch.float64))
    equal(tensor.grad, torch.full((4,), float(hvd.size()), dtype=torch.float64))


# ---- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_grouped_allreduce(dtype, ndim):
    tensors = [cube(dtype, ndim, seed) for seed in range(5)]
    kept = [tensor.clone() for tensor in tensors]
    outputs = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert len(outputs) == 5
    for output, tensor, before in zip(outputs, tensors, kept, strict=True):
        equal(output, times(before, hvd.size()))
        equal(tensor, before)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_grouped_allreduce_average(dtype, ndim):
    tensors = [cube(dtype, ndim, seed) for seed in range(5)]
    tolerance = 1e-6 if dtype.is_floating_point else 0
    for output, tensor in zip(hvd.grouped_allreduce(tensors), tensors, strict=True):
        torch.testing.assert_close(output, tensor, rtol=tolerance, atol=0)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_grouped_allreduce_in_place(dtype, ndim):
    tensors = [cube(dtype, ndim, seed) for seed in range(5)]
    expected = [times(tensor, hvd.size()) for tensor in tensors]
    outputs = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for output, tensor, reference in zip(outputs, tensors, expected, strict=True):
        assert output is tensor
        equal(tensor, reference)


@pytest.mark.parametrize("variant", ["grouped_allreduce_async", "grouped_allreduce_async_"])
def test_grouped_allreduce_async(variant):
    tensors = [whole(torch.float32, n, seed=n) for n in (1, 100, 7)]
    expected = [tensor * hvd.size() for tensor in tensors]
    handle = getattr(hvd, variant)(tensors, op=hvd.Sum, name="group")
    assert isinstance(handle, int)
    outputs = hvd.synchronize(handle)
    for output, tensor, reference in zip(outputs, tensors, expected, strict=True):
        equal(output, reference)
        assert (output is tensor) == variant.endswith("_")
    assert hvd.synchronize(handle) is None


@pytest.mark.parametrize("dtype", REDUCED)
def test_grouped_allreduce_scale_factors(dtype):
    tensors = [cube(dtype, 1, seed) for seed in range(3)]
    for factor in FACTORS:
        outputs = hvd.grouped_allreduce(tensors, op=hvd.Sum, prescale_factor=factor)
        for output, tensor in zip(outputs, tensors, strict=True):
            equal(output, times(scaled(tensor, factor), hvd.size()))
        outputs = hvd.grouped_allreduce(tensors, op=hvd.Sum, postscale_factor=factor)
        for output, tensor in zip(outputs, tensors, strict=True):
            equal(output, scaled(times(tensor, hvd.size()), factor))


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_grouped_allreduce_gradient(dtype, ndim, op):
    """``backward`` is called on each output in turn, and no gradient counts twice."""
    tensors = [cube(dtype, ndim, seed).requires_grad_() for seed in range(5)]
    for output in hvd.grouped_allreduce(tensors, op=getattr(hvd, op)):
        output.backward(torch.ones_like(output))
    for tensor in tensors:
        expected = torch.full_like(tensor, hvd.size() if op == "Sum" else 1)
        torch.testing.assert_close(tensor.grad, expected, rtol=0, atol=1e-8)


def test_grouped_allreduce_mismatch_fails_the_whole_group():
    tensors = [torch.ones(3), torch.ones(3 + hvd.rank()), torch.ones(3)]
    with pytest.raises(RuntimeError):
        hvd.grouped_allreduce(tensors, name="group")


def test_grouped_allreduce_compression():
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.int32)]
    outputs = hvd.grouped_allreduce(tensors, op=hvd.Sum, compression=hvd.Compression.fp16)
    for output, tensor in zip(outputs, tensors, strict=True):
        equal(output, tensor * hvd.size())
