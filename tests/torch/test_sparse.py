"""Sparse tensors: ranks that disagree about them, and sparse gradients that some ranks do not have."""

import gc

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "aab")


def coo(shape, dense_dims=0, dtype=torch.float32):
    """A sparse tensor with an element at its first and at its last index."""
    sizes = shape[: len(shape) - dense_dims]
    indices = torch.tensor([[0, size - 1] for size in sizes])
    values = torch.ones(2, *shape[len(sizes) :], dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def total(tensor, name):
    if tensor.is_sparse:
        return hvd.sparse_allreduce_async(tensor, name, hvd.Sum)()
    return hvd.allreduce(tensor, op=hvd.Sum, name=name)


DISAGREEMENTS = {
    "rows": (lambda last: coo((7 if last else 5, 2), 1), "[5, 2]", "[7, 2]"),
    "many rows": (lambda last: coo((9_000_000 if last else 4,)), "[4]", "[9000000]"),
    "dense part": (lambda last: coo((5, 4 if last else 3), 1), "[5, 3]", "[5, 4]"),
    "dimensions": (lambda last: coo((5, 2), 0 if last else 1), "sparse_dim 1", "sparse_dim 2"),
    "dtype": (
        lambda last: coo((5, 2), 1, torch.float16 if last else torch.int16),
        "sparse int16",
        "sparse float16",
    ),
    "kind": (lambda last: torch.ones(5, 2) if last else coo((5, 2), 1), "sparse", "dense"),
}


def check_disagreements():
    last = hvd.rank() == hvd.size() - 1
    for name, (make, first, second) in DISAGREEMENTS.items():
        tensor = make(last)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            total(tensor, name)
        text = str(caught.value)
        assert f"'allreduce.{name}': mismatched layout: " in text
        assert first in text.split(" but ")[0]
        assert second in text.split(" but ")[1]
        assert f"on rank {hvd.size() - 1}" in text
        assert "\n" not in text
    with pytest.raises(hvd.HorovodInternalError, match=r"\(average\) on .*\(sum\) on rank"):
        hvd.sparse_allreduce_async(coo((5,)), "op", hvd.Sum if last else hvd.Average)()
    # The job goes on, also under the names above.
    for name in ("rows", "kind"):
        summed = total(coo((4, 2), 1, torch.complex64), name).to_dense()
        assert torch.equal(summed[:, 1].real, hvd.size() * torch.tensor([1.0, 0, 0, 1]))
    empty = torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0, 0), (3, 2, 0))
    assert hvd.sparse_allreduce_async(empty, None, hvd.Average)().shape == (3, 2, 0)


@pytest.mark.short(failure=True)
def test_ranks_that_disagree_about_a_sparse_tensor_get_an_error_that_names_both_sides(ranks):
    ranks.run(check_disagreements)


# ---- gradients that are missing --------------------------------------------------------------------------------------


class Tables(torch.nn.Module):
    """Two tables with sparse gradients of which a batch may use none, and a layer that it always uses."""

    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(3)
        self.one = torch.nn.Embedding(7, 2, sparse=sparse)
        self.two = torch.nn.Embedding(5, 2, sparse=sparse)
        self.head = torch.nn.Linear(2, 1)

    def forward(self, used):
        x = torch.ones(1, 2)
        for table, row in used:
            x = x + (self.one, self.two)[table](torch.tensor([row]))
        return self.head(x).sum()


def used_by(rank, size):
    """The tables and rows that a rank uses in each step. In some steps one rank, some ranks or no ranks use a table,
    also in the first ones."""
    last = size - 1
    return [
        [(0, 1)] if rank == last else [],
        [(0, rank), (1, rank)],
        [(1, 4)] if rank != last else [],
        [],
        [(0, 6), (0, rank)] if rank == 0 else [(1, 0)],
    ]


def check_missing(zero_as_none, make, options):
    rank, size = hvd.rank(), hvd.size()
    model, alone = Tables(), Tables(sparse=False)
    passes = options.get("backward_passes_per_step", 1)
    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(make([p for _, p in named]), named, **options)
    expected = make(list(alone.parameters()))
    for step in range(len(used_by(0, size))):
        optimizer.zero_grad(set_to_none=zero_as_none)
        for _ in range(passes):
            model(used_by(rank, size)[step]).backward()
        optimizer.step()
        expected.zero_grad(set_to_none=False)
        for r in range(size):
            (alone(used_by(r, size)[step]) * passes / size).backward()
        expected.step()
        for (name, p), q in zip(named, alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, msg=lambda m, n=name, s=step: f"step {s}, {n}: {m}")
    whole = torch.cat([p.detach().flatten() for _, p in named])
    assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))
    # What was sparse stays sparse, also where this step's gradient was missing. (Zeros from before the first gradient
    # are dense, and stay if gradients are not set to None.)
    assert model.one.weight.grad.is_sparse
    assert model.two.weight.grad.is_sparse or not zero_as_none


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check_missing_everywhere():
    for zero_as_none in (True, False):
        check_missing(zero_as_none, momentum, {})
    check_missing(True, torch.optim.Adagrad, {"backward_passes_per_step": 2})


def test_a_sparse_gradient_that_a_rank_does_not_have_counts_as_sparse_zeros(ranks):
    ranks.run(check_missing_everywhere)


def check_missing_of_sparse_adam():
    """An optimizer that takes sparse gradients only, and a step in which no rank has one."""
    table = torch.nn.Embedding(4, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), 0)
    for as_dense in (False, True):
        table.zero_grad()
        start = table.weight.detach().clone()
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(
            optimizer, table.named_parameters(), sparse_as_dense=as_dense
        )
        optimizer.step()
        assert torch.equal(table.weight, start)
        for row in range(hvd.size()):
            optimizer.zero_grad()
            if row == hvd.rank():
                table(torch.tensor([row])).sum().backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            assert not torch.equal(table.weight[row], start[row])
            assert torch.equal(table.weight[row + 1 :], start[row + 1 :])
        del optimizer


def check_missing_in_groups():
    """In a group, a table is known to be sparse from its first gradient on."""
    model = Tables()
    named = list(model.named_parameters())
    for groups in (1, [[model.one.weight, model.head.weight]]):
        optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named, groups=groups)
        for used in ([(0, 1), (1, 1)], [(hvd.rank() % 2, 2)], []):
            optimizer.zero_grad()
            model(used).backward()
            optimizer.step()
        whole = torch.cat([p.detach().flatten() for _, p in named])
        assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))
        del optimizer


def check_sparse_here_and_dense_there():
    """One rank also uses a table as a matrix, which makes its gradient dense."""
    table = torch.nn.Embedding(6, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), 0)
    last = hvd.rank() == hvd.size() - 1

    def backward():
        value = table(torch.tensor([1])).sum()
        (value + table.weight.sum() if last else value).backward()

    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, [("table", table.weight)])
    backward()
    text = "'allreduce.table': mismatched layout: sparse float32 .* but dense float32 .* on rank"
    with pytest.raises(hvd.HorovodInternalError, match=text) as caught:
        optimizer.step()
    assert "\n" not in str(caught.value)
    del (
        optimizer,
        caught,
    )  # the frames of the exception also have the optimizer, whose hooks end with it
    gc.collect()
    table.zero_grad()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, [("table", table.weight)], sparse_as_dense=True)
    backward()
    optimizer.step()
    assert all(torch.equal(table.weight, w) for w in hvd.allgather_object(table.weight.detach()))


@pytest.mark.parametrize(
    "check",
    [check_missing_of_sparse_adam, check_missing_in_groups, check_sparse_here_and_dense_there],
)
def test_sparse_gradients_of_unusual_optimizers_and_models(ranks, check):
    ranks.run(check)
