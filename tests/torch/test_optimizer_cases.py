"""DistributedOptimizer with sparse gradients, other memory orders, and unusual optimizers and models."""

import gc
import warnings
import weakref

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture
from tests.harness.training import CLOSE, Model, batches, equal, joined, loss, train, wrapped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "aab")


def check_sparse(as_dense):
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 3, sparse=True)
    expected = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, table.named_parameters(), sparse_as_dense=as_dense
    )
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank(), 9, 9])).sum().backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        expected[9] -= 2
        for r in range(hvd.size()):
            expected[r] -= 1 / hvd.size()
    torch.testing.assert_close(table.weight.detach(), expected)
    adam = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    adam = hvd.DistributedOptimizer(adam, table.named_parameters(), sparse_as_dense=as_dense)
    del optimizer
    gc.collect()
    adam.zero_grad()
    table(torch.tensor([hvd.rank()])).sum().backward()
    adam.step()


def check_sparse_in_group():
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 3, sparse=True)
    head = torch.nn.Linear(3, 1)
    named = [*table.named_parameters(prefix="t"), *head.named_parameters(prefix="h")]
    for groups in (1, [[table.weight], list(head.parameters())]):
        optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, named, groups=groups)
        for _ in range(2):
            optimizer.zero_grad()
            head(table(torch.tensor([hvd.rank()]))).sum().backward()
            optimizer.step()
        whole = torch.cat([p.detach().flatten() for _, p in named])
        assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))
        del optimizer


def check_conjugates_and_negatives():
    """Gradients that PyTorch conjugates or negates only when they are read, on one rank or on all."""
    rank, size = hvd.rank(), hvd.size()
    c = torch.tensor([[1 + 2j, -3 - 1j], [0.5 - 4j, 2j]])
    options = [
        {},
        {"groups": 1},
        {"compression": hvd.Compression.fp16},
        {"backward_passes_per_step": 2},
        {"op": hvd.Sum},
        {"gradient_as_bucket_view": True},
    ]
    for each in options:
        in_buckets = each.get("gradient_as_bucket_view", False)
        passes = each.get("backward_passes_per_step", 1)
        z = torch.nn.Parameter(torch.zeros_like(c), requires_grad=not in_buckets)
        x = torch.nn.Parameter(torch.zeros(2, 2))
        if rank == 0:
            x.register_hook(lambda grad: torch._neg_view(-grad))
        named = [("x", x)] if in_buckets else [("z", z), ("x", x)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in named], lr=1.0), named, **each
        )
        for _ in range(passes):
            # The bits are set on rank 0 only.
            if z.requires_grad:
                ((z.conj() if rank == 0 else z) * c).sum().real.backward()
            (x * c.imag).sum().backward()
        assert passes > 1 or in_buckets or z.grad.is_conj() == (rank == 0)
        assert passes > 1 or in_buckets or x.grad.is_neg() == (rank == 0)
        optimizer.step()
        share = passes if optimizer.op == hvd.Sum else passes / size
        expected = -share * (c + (size - 1) * c.conj()).resolve_conj()
        if z.requires_grad:
            torch.testing.assert_close(z.detach().resolve_conj(), expected)
        torch.testing.assert_close(x.detach(), -share * size * c.imag)
        del optimizer


def check_channels_last():
    """The memory order of convolutions' gradients is channels_last on some ranks only."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3)
    if hvd.rank() % 2 == 0:
        model.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    start = model.weight.detach().clone()
    x = torch.randn(hvd.size(), 2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    model(x[hvd.rank()]).pow(2).sum().backward()
    optimizer.step()
    alone = torch.nn.Conv2d(3, 4, 3)
    alone.load_state_dict({"weight": start, "bias": model.bias.detach()})
    alone.bias.data += model.bias.grad
    for each in x:
        (alone(each).pow(2).sum() / hvd.size()).backward()
    torch.testing.assert_close(start - model.weight, alone.weight.grad, rtol=1e-4, atol=1e-4)


def check_shared_state():
    """The wrapper shares the optimizer's groups and state, and the optimizer's own hooks still run."""
    model = Model()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    calls = []
    plain.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    loss(model, torch.ones(6, 4)).backward()
    optimizer.step()
    assert calls == ["step"]
    assert optimizer.state[model.first.bias]["step"] == 2
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.zero_grad()
    loss(model, torch.ones(6, 4)).backward()
    optimizer.step()
    assert calls == ["step", "step"], "step hooks run once"
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def check_custom_optimizer():
    """The constructor of the optimizer requires further arguments."""

    class Plain(torch.optim.Optimizer):
        def __init__(self, params, rate, *, sign):
            super().__init__(params, {"rate": rate})
            self.sign = sign

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in filter(lambda p: p.grad is not None, group["params"]):
                    p += self.sign * group["rate"] * p.grad
            return "stepped"

    model = Model()
    optimizer = hvd.DistributedOptimizer(
        Plain(model.parameters(), 0.1, sign=-1), model.named_parameters()
    )
    for x in batches(2):
        optimizer.zero_grad()
        loss(model, x[hvd.rank()]).backward()
        assert optimizer.step() == "stepped"
    equal(model, joined(2, options={"lr": 0.1}), **CLOSE)


def check_frozen_and_added():
    for groups in (None, 1):
        model = Model()
        model.first.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.2})
        if hvd.size() > 1:
            assert len(optimizer._requires_update) == 3
        for x in batches(2):
            optimizer.zero_grad()
            loss(model, x[hvd.rank()]).backward()
            optimizer.step()
        assert model.first.weight.grad is None
        whole = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))


def check_required():
    """Programs take parameters out of ``_requires_update``: those without a gradient are not reduced then."""
    for groups in (None, 2):
        for change in (
            lambda optimizer, model: setattr(optimizer, "_requires_update", set()),
            lambda optimizer, model: setattr(optimizer, "_requires_update", []),
            lambda optimizer, model: optimizer._requires_update.clear(),
            lambda optimizer, model: [
                optimizer._requires_update.discard(p) for p in model.unused.parameters()
            ],
        ):
            model = Model()
            optimizer = wrapped(model, groups=groups and [list(model.unused.parameters())])
            change(optimizer, model)
            train(optimizer, model, 2)
            assert all(p.grad is None for p in model.unused.parameters())
            whole = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))
            optimizer._requires_update.update(model.unused.parameters())
            train(optimizer, model, 1)
            if hvd.size() > 1:
                assert all(p.grad is not None for p in model.unused.parameters())


def check_replaced():
    """The hooks of a wrapper disappear with it, so that the same parameters can be wrapped again."""
    model = Model()
    for _ in range(3):
        optimizer = wrapped(model)
        reference = weakref.ref(optimizer)
        train(optimizer, model, 1)
        del optimizer
        gc.collect()
        assert reference() is None
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss(model, torch.ones(6, 4)).backward()  # reduces nothing
    hvd.barrier()


def check_create_graph():
    model = Model()
    optimizer = wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about reference cycles
        loss(model, batches(1)[0][hvd.rank()]).backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    equal(model, joined(1), **CLOSE)


CHECKS = [
    check_sparse_in_group,
    check_conjugates_and_negatives,
    check_channels_last,
    check_shared_state,
    check_custom_optimizer,
    check_frozen_and_added,
    check_replaced,
    check_required,
    check_create_graph,
]


@pytest.mark.parametrize("check", CHECKS)
def test_optimizer_with_unusual_models_and_optimizers(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("as_dense", [False, True])
def test_optimizer_with_sparse_gradients(ranks, as_dense):
    ranks.run(check_sparse, as_dense)
