"""broadcast, in place and out of place."""

import contextlib

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import FLOAT_CASES, MOVED_CASES, equal

pytestmark = pytest.mark.shared_job


def filled(dtype, ndim, value):
    return torch.full([17] * ndim, value, dtype=dtype)


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_broadcast_out_of_place(dtype, ndim):
    for root in range(hvd.size()):
        tensor = filled(dtype, ndim, hvd.rank())
        output = hvd.broadcast(tensor, root)
        equal(tensor, filled(dtype, ndim, hvd.rank()))
        equal(output, filled(dtype, ndim, root))
        assert output is not tensor


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_broadcast_in_place(dtype, ndim):
    for root in range(hvd.size()):
        tensor = filled(dtype, ndim, hvd.rank())
        assert hvd.broadcast_(tensor, root_rank=root) is tensor
        equal(tensor, filled(dtype, ndim, root))


def test_broadcast_async():
    handles = [
        hvd.broadcast_async(torch.full((n + 1,), hvd.rank()), n % hvd.size()) for n in range(20)
    ]
    for n, handle in enumerate(handles):
        equal(hvd.synchronize(handle), torch.full((n + 1,), n % hvd.size()))
    tensor = torch.full((3,), hvd.rank())
    handle = hvd.broadcast_async_(tensor, root_rank=hvd.size() - 1, name="in place")
    assert hvd.synchronize(handle) is tensor
    equal(tensor, torch.full((3,), hvd.size() - 1))


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (1,)])
def test_broadcast_of_every_shape(shape):
    equal(hvd.broadcast(torch.full(shape, float(hvd.rank())), 0), torch.zeros(shape))


def test_broadcast_supports_bool():
    """Horovod refuses bool tensors; horoplug accepts them."""
    assert hvd.broadcast(torch.tensor([hvd.rank() == 0]), 0).tolist() == [True]


def test_broadcast_refuses_different_shapes():
    with pytest.raises(RuntimeError):
        hvd.broadcast(torch.ones(17, 10 * (hvd.rank() + 1), 17), 0)
    equal(hvd.broadcast(torch.ones(1), 0), torch.ones(1))


def test_broadcast_refuses_different_dtypes():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    with pytest.raises(RuntimeError):
        hvd.broadcast(torch.ones(17, dtype=dtype), 0)


def test_broadcast_refuses_different_roots():
    with pytest.raises(RuntimeError):
        hvd.broadcast(torch.ones(17, 17), hvd.rank())


def test_broadcast_refuses_root_out_of_range():
    for root in (-1, hvd.size()):
        with pytest.raises((ValueError, RuntimeError)):
            hvd.broadcast(torch.ones(1), root)


def test_broadcast_of_strided_tensors_in_place():
    """Horovod raises ValueError; horoplug's result must be correct."""
    whole = torch.arange(16.0).reshape(4, 4) + 100 * hvd.rank()
    expected = whole.clone()
    expected[:, 1] = torch.arange(16.0).reshape(4, 4)[:, 1]
    with contextlib.suppress(ValueError):
        hvd.broadcast_(whole[:, 1], 0)
        equal(whole, expected)


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
def test_broadcast_gradient(dtype, ndim):
    """The gradient is the average on the root and zero on other ranks."""
    for root in range(hvd.size()):
        tensor = filled(dtype, ndim, hvd.rank()).requires_grad_()
        output = hvd.broadcast(tensor, root)
        output.backward(torch.ones_like(output))
        expected = filled(dtype, ndim, 1 if hvd.rank() == root else 0)
        torch.testing.assert_close(tensor.grad, expected, rtol=0, atol=1e-8)
