"""Process sets, static and dynamic, and operations on them."""

import itertools
import os

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import mpi_ops

from tests.api.horovod_api.matrix import (
    FLOAT_CASES,
    MOVED_CASES,
    REDUCED_CASES,
    cube,
    equal,
    times,
    whole,
)

pytestmark = pytest.mark.no_job

RANK, SIZE = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


@pytest.fixture
def dynamic():
    """A job in which process sets can be added and removed."""
    hvd.init(process_sets="dynamic")
    yield
    hvd.barrier()
    hvd.shutdown()


class Parity:
    """The process sets of even and of odd ranks; ``mine`` is the one that contains this rank."""

    def __init__(self):
        size, rank = hvd.size(), hvd.rank()
        self.even = hvd.add_process_set(range(0, size, 2))
        self.odd = hvd.add_process_set(hvd.ProcessSet(range(1, size, 2)))
        self.mine, self.other = (self.odd, self.even) if rank % 2 else (self.even, self.odd)
        self.size = len(self.mine.ranks)
        self.place = self.mine.ranks.index(rank)


@pytest.fixture
def parity(dynamic):
    sets = Parity()
    yield sets
    assert hvd.remove_process_set(sets.odd) is True
    assert hvd.remove_process_set(sets.even) is True


def known():
    return mpi_ops._basics._get_process_set_ids_and_ranks()


# ---- attributes -----------------------------------------------------------------------------------------------------


def test_process_set_attributes(parity):
    size = hvd.size()
    assert parity.even.ranks == list(range(0, size, 2))
    assert parity.odd.ranks == list(range(1, size, 2))
    assert (parity.even.process_set_id, parity.odd.process_set_id) == (1, 2)
    assert parity.even.size() == (size + 1) // 2
    assert parity.mine.included() is True
    assert parity.other.included() is False
    assert parity.mine.rank() == hvd.rank() // 2
    assert known() == {0: list(range(size)), 1: parity.even.ranks, 2: parity.odd.ranks}


def test_ranks_are_sorted_and_must_be_integers():
    assert hvd.ProcessSet([2, 0, 1]).ranks == [0, 1, 2]
    with pytest.raises(ValueError, match="ranks"):
        hvd.ProcessSet(["0", "1"])


def test_attributes_before_init():
    process_set = hvd.ProcessSet([0])
    assert process_set.process_set_id is None
    assert process_set.included() is None
    assert process_set.size() is None
    assert process_set.rank() is None


def test_global_set_follows_the_job(dynamic):
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert known() == {0: list(range(hvd.size()))}


def test_process_sets_passed_to_init():
    first = hvd.ProcessSet([0])
    others = list(range(1, SIZE))
    second = hvd.ProcessSet(others if RANK == 0 else reversed(others))  # the order does not matter
    hvd.init(process_sets=[first, second])
    assert (first.process_set_id, second.process_set_id) == (1, 2)
    assert known() == {0: list(range(SIZE)), 1: [0], 2: others}
    mine = first if RANK == 0 else second
    output = hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=mine)
    equal(output, torch.full((2,), float(mine.size())))
    hvd.barrier()
    hvd.shutdown()
    assert first.process_set_id is None


def test_duplicate_process_sets_passed_to_init_are_refused():
    """Duplicates, also of the global set, are refused, and the next init is unaffected."""
    sets = [[0], range(1, SIZE), range(SIZE - 1, -1, -1), [0]]
    with pytest.raises(ValueError, match=r"\S"):
        hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in sets])
    hvd.init(process_sets=[hvd.ProcessSet(ranks) for ranks in sets[:2]])
    assert known() == {0: list(range(SIZE)), 1: [0], 2: list(range(1, SIZE))}
    hvd.barrier()


def test_process_sets_can_be_added_without_the_dynamic_option():
    """Horovod requires HOROVOD_DYNAMIC_PROCESS_SETS=1; horoplug does not."""
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    assert hvd.add_process_set([1]).process_set_id == 2
    hvd.barrier()


def test_dynamic_process_sets_by_environment_variable(monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init()
    added = hvd.add_process_set([0])
    assert added.process_set_id == 1
    assert hvd.remove_process_set(added) is True
    hvd.barrier()


# ---- adding and removing --------------------------------------------------------------------------------------------


def test_add_process_set_returns_the_set(dynamic):
    process_set = hvd.ProcessSet([0, 1])
    if hvd.size() == 2:  # that is the global set
        with pytest.raises(ValueError, match=r"\S"):
            hvd.add_process_set(process_set)
        return
    assert hvd.add_process_set(process_set) is process_set
    assert isinstance(hvd.add_process_set([1]), hvd.ProcessSet)


def test_adding_a_process_set_twice_is_refused(dynamic):
    hvd.add_process_set([0])
    with pytest.raises(ValueError, match=r"\S"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match=r"\S"):
        hvd.add_process_set(range(hvd.size()))
    assert known() == {0: list(range(hvd.size())), 1: [0]}


def test_remove_process_set(dynamic):
    first, second = hvd.add_process_set([0]), hvd.add_process_set([1])
    assert hvd.remove_process_set(first) is True
    assert first.process_set_id is None
    assert known() == {0: list(range(hvd.size())), 2: [1]}
    assert hvd.remove_process_set(second) is True
    assert known() == {0: list(range(hvd.size()))}


def test_global_set_cannot_be_removed(dynamic):
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.global_process_set.process_set_id == 0


def test_process_set_can_be_added_again_after_removal(dynamic):
    for _ in range(20):
        added = hvd.add_process_set([0])
        if hvd.rank() == 0:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=added) == 1
        assert hvd.remove_process_set(added) is True


def test_different_ranks_for_one_process_set_are_an_error(dynamic):
    with pytest.raises((ValueError, RuntimeError)):
        hvd.add_process_set([0] if hvd.rank() == 0 else [1])


def test_shutdown_removes_process_sets(dynamic):
    added = hvd.add_process_set([0])
    hvd.barrier()
    hvd.shutdown()
    assert added.process_set_id is None
    hvd.init(process_sets="dynamic")
    assert known() == {0: list(range(hvd.size()))}


def test_operation_on_a_rank_outside_the_set_is_refused(parity):
    with pytest.raises((ValueError, RuntimeError)):
        hvd.allreduce(torch.ones(1), process_set=parity.other)


def test_operation_on_a_removed_set_is_refused(dynamic):
    added = hvd.add_process_set([0])
    hvd.remove_process_set(added)
    with pytest.raises((ValueError, RuntimeError)):
        hvd.allreduce(torch.ones(1), process_set=added)


# ---- operations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_allreduce_in_a_process_set(parity, dtype, ndim):
    tensor = cube(dtype, ndim, seed=hvd.rank() % 2)
    equal(hvd.allreduce(tensor, op=hvd.Sum, process_set=parity.mine), times(tensor, parity.size))
    average = hvd.allreduce(tensor, process_set=parity.mine)
    torch.testing.assert_close(average, tensor, rtol=1e-6 if dtype.is_floating_point else 0, atol=0)
    group = hvd.grouped_allreduce([tensor] * 5, op=hvd.Sum, process_set=parity.mine)
    for output in group:
        equal(output, times(tensor, parity.size))


def test_average_divides_by_the_size_of_the_set(parity):
    tensor = torch.full((3,), 6.0 * parity.place)
    expected = 6.0 * (parity.size - 1) / 2
    equal(hvd.allreduce(tensor, process_set=parity.mine), torch.full((3,), expected))


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_allgather_in_a_process_set(parity, dtype, ndim):
    shape = [17] * ndim
    tensor = torch.full(shape, hvd.rank(), dtype=dtype)
    expected = torch.cat([torch.full(shape, rank, dtype=dtype) for rank in parity.mine.ranks])
    equal(hvd.allgather(tensor, process_set=parity.mine), expected)
    for output in hvd.grouped_allgather([tensor] * 5, process_set=parity.mine):
        equal(output, expected)


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_broadcast_in_a_process_set(parity, dtype, ndim):
    """The root is a global rank."""
    for root in parity.mine.ranks:
        tensor = torch.full([17] * ndim, hvd.rank(), dtype=dtype)
        output = hvd.broadcast(tensor, root, process_set=parity.mine)
        equal(output, torch.full([17] * ndim, root, dtype=dtype))
        hvd.broadcast_(tensor, root, process_set=parity.mine)
        equal(tensor, output)


def test_broadcast_from_a_root_outside_the_set_is_refused(parity):
    with pytest.raises((ValueError, RuntimeError)):
        hvd.broadcast(torch.ones(1), parity.other.ranks[0], process_set=parity.mine)


@pytest.mark.parametrize(("dtype", "ndim"), MOVED_CASES)
def test_alltoall_in_a_process_set(parity, dtype, ndim):
    """rank + 1 rows for each member."""
    rank, ranks = hvd.rank(), parity.mine.ranks
    tail = [2] * (ndim - 1)
    tensor = torch.cat([torch.full((rank + 1, *tail), r, dtype=dtype) for r in ranks])
    splits = torch.tensor([rank + 1] * parity.size, dtype=torch.int32)
    output, counts = hvd.alltoall(tensor, splits, process_set=parity.mine)
    assert counts.tolist() == [r + 1 for r in ranks]
    equal(output, torch.full((sum(r + 1 for r in ranks), *tail), rank, dtype=dtype))
    equal(hvd.alltoall(tensor, process_set=parity.mine), output)


@pytest.mark.parametrize(("dtype", "ndim"), REDUCED_CASES)
def test_reducescatter_in_a_process_set(parity, dtype, ndim):
    tensor = whole(dtype, *[parity.size * 4] * ndim, seed=hvd.rank() % 2)
    expected = times(tensor[parity.place * 4 : (parity.place + 1) * 4], parity.size)
    equal(hvd.reducescatter(tensor, op=hvd.Sum, process_set=parity.mine), expected)
    for output in hvd.grouped_reducescatter([tensor] * 5, op=hvd.Sum, process_set=parity.mine):
        equal(output, expected)


def test_names_are_separate_in_each_set(parity):
    """One name is in flight in two sets, and the counts of unnamed calls differ between the sets."""
    for _ in range(hvd.rank() % 2 + 1):
        hvd.allreduce(torch.ones(1), process_set=parity.mine)
    first = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="x", process_set=parity.mine)
    second = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="x")
    assert hvd.synchronize(first) == parity.size
    assert hvd.synchronize(second) == hvd.size()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def test_barrier_of_a_set_does_not_wait_for_others(parity):
    for _ in range(3 if hvd.rank() % 2 else 1):
        hvd.barrier(parity.mine)
    hvd.barrier(process_set=parity.mine)


def test_broadcast_object_in_a_process_set(parity):
    expected = {"hello": 123, 0: [1, 2]}
    root = parity.mine.ranks[0]
    got = hvd.broadcast_object(
        expected if hvd.rank() == root else {}, root_rank=root, process_set=parity.mine
    )
    assert got == expected


def test_sparse_allreduce_in_a_process_set(parity):
    for key, rows in enumerate([17, 32, 81, 12]):
        torch.manual_seed(100 * key + hvd.rank())
        dense = torch.rand(rows, 10)
        dense[dense < 0.8] = 0
        expected = hvd.allreduce(dense, process_set=parity.mine)
        function = hvd.sparse_allreduce_async(
            dense.to_sparse(), op=hvd.Average, name=str(key), process_set=parity.mine
        )
        torch.testing.assert_close(function().to_dense(), expected, rtol=1e-6, atol=1e-6)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
@pytest.mark.parametrize("grouped", [False, True])
def test_allreduce_gradient_in_a_process_set(parity, dtype, ndim, grouped):
    tensors = [cube(dtype, ndim, seed).requires_grad_() for seed in range(5 if grouped else 1)]
    if grouped:
        outputs = hvd.grouped_allreduce(tensors, op=hvd.Sum, process_set=parity.mine)
    else:
        outputs = [hvd.allreduce(tensors[0], op=hvd.Sum, process_set=parity.mine)]
    for output in outputs:
        output.backward(torch.ones_like(output))
    for tensor in tensors:
        equal(tensor.grad, torch.full_like(tensor, parity.size))


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
@pytest.mark.parametrize("grouped", [False, True])
def test_allgather_gradient_in_a_process_set(parity, dtype, ndim, grouped):
    rows = [3, 2, 7, 4]
    tail = [17] * (ndim - 1)
    shape = (rows[hvd.rank()], *tail)
    tensors = [
        torch.ones(shape, dtype=dtype, requires_grad=True) for _ in range(5 if grouped else 1)
    ]
    if grouped:
        outputs = hvd.grouped_allgather(tensors, process_set=parity.mine)
    else:
        outputs = [hvd.allgather(tensors[0], process_set=parity.mine)]
    back = torch.cat([torch.full((rows[r], *tail), r, dtype=dtype) for r in parity.mine.ranks])
    for output in outputs:
        output.backward(back)
    for tensor in tensors:
        torch.testing.assert_close(
            tensor.grad, torch.full_like(tensor, hvd.rank()), rtol=0, atol=1e-8
        )


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
def test_broadcast_gradient_in_a_process_set(parity, dtype, ndim):
    for root in parity.mine.ranks:
        tensor = cube(dtype, ndim).requires_grad_()
        output = hvd.broadcast(tensor, root, process_set=parity.mine)
        output.backward(torch.ones_like(output))
        equal(tensor.grad, torch.full_like(tensor, 1 if hvd.rank() == root else 0))


@pytest.mark.parametrize(("dtype", "ndim"), FLOAT_CASES)
def test_alltoall_gradient_in_a_process_set(parity, dtype, ndim):
    rows = (hvd.rank() + 1) * parity.size
    tensor = torch.ones(rows, *[2] * (ndim - 1), dtype=dtype, requires_grad=True)
    output, _ = hvd.alltoall(tensor, [hvd.rank() + 1] * parity.size, process_set=parity.mine)
    output.backward(torch.ones_like(output))
    equal(tensor.grad, torch.ones_like(tensor))


@pytest.mark.parametrize(
    ("dtype", "ndim"),
    list(itertools.product([torch.float16, torch.float32, torch.float64], [1, 2, 3])),
)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter_gradient_in_a_process_set(parity, dtype, ndim, op):
    tensor = whole(dtype, *[parity.size * 4] * ndim).requires_grad_()
    output = hvd.reducescatter(tensor, op=getattr(hvd, op), process_set=parity.mine)
    output.backward(torch.ones_like(output))
    equal(tensor.grad, torch.full_like(tensor, parity.size if op == "Sum" else 1))


# ---- optimizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["none", "groups", "two passes"])
def test_optimizer_in_a_process_set(parity, options):
    """Members of the set have equal parameters; the others step alone, without communication."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    passes = 2 if options == "two passes" else 1
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1),
        named_parameters=model.named_parameters(),
        process_set=parity.even,
        groups=2 if options == "groups" else None,
        backward_passes_per_step=passes,
    )
    torch.manual_seed(10 + hvd.rank())
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    weights = hvd.allgather_object(model[2].weight.detach())
    for rank, other in enumerate(weights):
        if rank == hvd.rank():
            continue
        both_even = rank % 2 == 0 and hvd.rank() % 2 == 0
        assert torch.equal(other, weights[hvd.rank()]) == both_even


def test_optimizers_in_two_process_sets(parity):
    """The even and the odd ranks train different models with the same parameter names."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        process_set=parity.mine,
    )
    model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    optimizer.step()
    mean = sum(parity.mine.ranks) / parity.size
    assert model.weight.item() == pytest.approx(-mean)
