"""op=hvd.Adasum: orthogonal tensors are added, parallel ones averaged. For jobs whose size is a power
of two: 2 or 4 ranks."""

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from tests.api.horovod_api.matrix import equal


def check_close(dtype, expected, actual):
    """Horovod's criterion: the relative error is below 100 times the dtype's epsilon."""
    error = np.linalg.norm(expected - actual.astype(np.float64)) / np.linalg.norm(expected)
    assert error / 100 < np.finfo(dtype).eps


def lengths():
    size = hvd.size()
    return [size * 20 - 17, size * 2 + 1, size + 2, 2**19]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_adasum_adds_orthogonal_tensors(dtype):
    random = np.random.default_rng(2)
    columns = []
    for length in lengths():
        q, _ = np.linalg.qr(random.normal(size=(length, hvd.size())))
        columns.append(q.astype(dtype))
    handles = [
        hvd.allreduce_async(torch.from_numpy(q[:, hvd.rank()].copy()), op=hvd.Adasum)
        for q in columns
    ]
    for q, handle in zip(columns, handles, strict=True):
        output = hvd.synchronize(handle).numpy()
        assert output.dtype == dtype
        check_close(dtype, q.astype(np.float64).sum(1), output)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_adasum_averages_parallel_tensors(dtype):
    random = np.random.default_rng(2)
    columns = []
    for length in lengths():
        direction, factors = random.normal(size=(length, 1)), random.normal(size=(1, hvd.size()))
        columns.append((direction @ factors).astype(dtype))
    handles = [
        hvd.allreduce_async(torch.from_numpy(q[:, hvd.rank()].copy()), op=hvd.Adasum)
        for q in columns
    ]
    for q, handle in zip(columns, handles, strict=True):
        check_close(dtype, q.astype(np.float64).mean(1), hvd.synchronize(handle).numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_adasum_of_tiny_values(dtype):
    """The squares of the values underflow in the dtype."""
    random = np.random.default_rng(2)
    tiny = float(np.finfo(dtype).tiny)
    q = (random.normal(0, tiny, (1024, 1)) @ random.normal(size=(1, hvd.size()))).astype(dtype)
    tensor = torch.from_numpy(q[:, hvd.rank()].copy())
    hvd.allreduce_(tensor, op=hvd.Adasum)
    check_close(dtype, q.astype(np.float64).mean(1), tensor.numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_adasum_of_values_of_very_different_sizes(dtype):
    random = np.random.default_rng(2)
    low, high = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max) ** 0.5
    size = hvd.size()
    factors = [high ** ((i + 1) / size) * low ** ((size - i - 1) / size) for i in range(size)]
    q = (random.normal(size=(1024, 1)) @ np.array([factors])).astype(dtype)
    tensor = torch.from_numpy(q[:, hvd.rank()].copy())
    hvd.allreduce_(tensor, op=hvd.Adasum)
    check_close(dtype, q.astype(np.float64).mean(1), tensor.numpy())


def test_adasum_of_zeros():
    equal(hvd.allreduce(torch.zeros(7), op=hvd.Adasum), torch.zeros(7))
    mine = torch.ones(7) if hvd.rank() == 0 else torch.zeros(7)
    equal(hvd.allreduce(mine, op=hvd.Adasum), torch.ones(7))


def test_adasum_result_is_the_same_on_every_rank():
    torch.manual_seed(hvd.rank())
    outputs = hvd.allgather_object(hvd.allreduce(torch.randn(1001), op=hvd.Adasum, name="a"))
    for output in outputs:
        equal(output, outputs[0])


def test_grouped_adasum_equals_single_calls():
    """Each tensor of a group is combined separately, as in single calls."""
    torch.manual_seed(hvd.rank())
    tensors = [torch.randn(n) for n in (3, 100, 1)]
    single = [hvd.allreduce(tensor, op=hvd.Adasum) for tensor in tensors]
    for output, expected in zip(hvd.grouped_allreduce(tensors, op=hvd.Adasum), single, strict=True):
        torch.testing.assert_close(output, expected)


def test_adasum_optimizer_averages_parallel_changes():
    """The optimizer combines the changes of the parameters, not the gradients: parallel changes are averaged."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    assert isinstance(optimizer, torch.optim.SGD)
    for step in (1, 2):
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        mean = sum(range(1, hvd.size() + 1)) / hvd.size()
        torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -0.1 * step * mean))


def test_adasum_optimizer_cannot_skip_synchronize():
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
    )
    with pytest.raises(AssertionError), optimizer.skip_synchronize():
        pass
