"""hvd.join: a rank has no more data.

Two differences from Horovod are in this file. Horovod refuses allgather and broadcast once a rank has joined; in
horoplug that rank takes part in an allgather with no rows, and in a broadcast unless it is the root. In Horovod it
contributes zeros to every reduction; in horoplug it contributes the identity element to Min, Max and Product."""

import horovod.torch as hvd
import pytest
import torch

from tests.api.horovod_api.matrix import INTEGERS, NDIMS, equal, whole


def check_last(last, first):
    """Check that every rank gets the same last rank, which is not the one that joined first."""
    assert isinstance(last, int)
    assert last != first
    assert hvd.allgather_object(last) == [last] * hvd.size()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("ndim", NDIMS)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float32, torch.float64])
def test_allreduce_with_a_joined_rank(dtype, ndim, cached):
    """A joined rank contributes zero, and an average still divides by the size of the job. ``cached``: the names were
    used before."""
    size = hvd.size()
    for first in range(size):
        tensors = {"tensor_a": whole(dtype, *[5] * ndim), "tensor_b": whole(dtype, *[17] * ndim)}

        def reduce(tensors=tensors):
            handles = [hvd.allreduce_async(tensor, name=name) for name, tensor in tensors.items()]
            return [hvd.synchronize(handle) for handle in handles]

        if cached:
            reduce()
        if hvd.rank() == first:
            last = hvd.join()
        else:
            for output, tensor in zip(reduce(), tensors.values(), strict=True):
                rounding = "trunc" if dtype in INTEGERS else None
                expected = (tensor * (size - 1)).div(size, rounding_mode=rounding)
                assert torch.allclose(output, expected, rtol=1e-6 if rounding is None else 0)
            last = hvd.join()
        check_last(last, first)


@pytest.mark.parametrize("op", ["Sum", "Min", "Max", "Product"])
@pytest.mark.parametrize("value", [2.0, -2.0])
def test_min_max_and_product_ignore_a_joined_rank(op, value):
    if hvd.rank() > 0:
        others = hvd.size() - 1
        expected = {"Sum": value * others, "Product": value**others}.get(op, value)
        output = hvd.allreduce(torch.full((3,), value), op=getattr(hvd, op), name="x")
        equal(output, torch.full((3,), expected))
    hvd.join()


def test_grouped_allreduce_with_a_joined_rank():
    if hvd.rank() > 0:
        outputs = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum, name="group")
        for output in outputs:
            equal(output, torch.full_like(output, hvd.size() - 1))
    hvd.join()


def test_join_returns_the_last_rank():
    """Rank r joins after r more allreduces than rank 0, which fixes the order."""
    for _ in range(hvd.rank()):
        hvd.allreduce(torch.ones(1), op=hvd.Sum)
    hvd.join()
    order = list(range(hvd.size()))
    for last in order:
        if hvd.rank() == last:
            for n in range(3):
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"{last}.{n}") == 1
        check = hvd.join()
        assert hvd.allgather_object(check) == [check] * hvd.size()
        assert check == last


def test_join_accepts_a_device():
    """The device is -1 for the CPU or the number of a GPU, and has no effect."""
    assert isinstance(hvd.join(-1), int)
    assert isinstance(hvd.join(device=hvd.local_rank()), int)


def test_all_ranks_join_at_once():
    for _ in range(20):
        last = hvd.join()
        assert hvd.allgather_object(last) == [last] * hvd.size()


def test_ranks_with_different_numbers_of_batches():
    """The purpose of join: the number of batches differs between ranks."""
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(3):
        for _ in range(hvd.rank() + 1):
            optimizer.zero_grad()
            model(torch.rand(4, 2)).sum().backward()
            optimizer.step()
        assert hvd.join() == hvd.size() - 1
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)


def test_allgather_with_a_joined_rank():
    for first in range(hvd.size()):
        if hvd.rank() != first:
            output = hvd.allgather(torch.full((2, 3), float(hvd.rank())), name="gathered")
            present = [rank for rank in range(hvd.size()) if rank != first]
            equal(output, torch.cat([torch.full((2, 3), float(rank)) for rank in present]))
        check_last(hvd.join(), first)


def test_broadcast_with_a_joined_rank():
    for first in range(hvd.size()):
        root = (first + 1) % hvd.size()
        if hvd.rank() != first:
            output = hvd.broadcast(torch.full((3,), float(hvd.rank())), root, name="sent")
            equal(output, torch.full((3,), float(root)))
        check_last(hvd.join(), first)


def test_broadcast_from_a_joined_root_is_an_error():
    for first in range(hvd.size()):
        if hvd.rank() != first:
            with pytest.raises(RuntimeError):
                hvd.broadcast(torch.ones(3), first, name="from nobody")
        check_last(hvd.join(), first)


def test_join_needs_init():
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises((ValueError, RuntimeError)):
        hvd.join()
