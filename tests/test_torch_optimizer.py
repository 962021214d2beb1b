"""DistributedOptimizer: each of its options, on a small model whose joined gradients are computed beside it."""

import gc
import warnings
import weakref

import pytest
import torch

import horoplug.torch as hvd

pytest_plugins = ["jobs"]

PLACES = ["a", "aa", "aab"]


@pytest.fixture(scope="module", params=PLACES)
def ranks(request, pool):
    with pool.ranks(len(request.param), hosts=request.param) as job:
        yield job


class Model(torch.nn.Module):
    """Two layers in use, and one that never is."""

    def __init__(self, key=0):
        super().__init__()
        torch.manual_seed(key)
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 2)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def batches(count, key=1):
    """Batch ``step`` of every rank, as one tensor (count, ranks, rows, 4)."""
    return torch.randn(count, hvd.size(), 6, 4, generator=torch.Generator().manual_seed(key))


def loss(model, x):
    return (model(x) ** 2).mean()


def wrapped(model, kind=torch.optim.SGD, options=None, **more):
    options = options or {"lr": 0.1, "momentum": 0.9}
    optimizer = kind(model.parameters(), **options)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **more)


def joined(steps, passes=1, op=hvd.Average, options=None, kind=torch.optim.SGD, data=None):
    """The parameters after training alone with the gradients of all ranks."""
    model = Model()
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1, "momentum": 0.9}))
    data = batches(steps * passes) if data is None else data
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(passes):
            for x in data[step * passes + n]:
                factor = 1 / hvd.size() if op == hvd.Average else 1
                (loss(model, x) * factor).backward()
        if hvd.size() > 1:  # then the wrapper makes zeros of missing gradients
            for p in model.unused.parameters():
                p.grad = torch.zeros_like(p)
        optimizer.step()
    return model


def train(optimizer, model, steps, passes=1, data=None):
    data = batches(steps * passes) if data is None else data
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(passes):
            loss(model, data[step * passes + n][hvd.rank()]).backward()
        optimizer.step()


def equal(model, other, **tolerance):
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}", **tolerance)
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    for theirs in hvd.allgather_object(whole):
        assert torch.equal(whole, theirs), "ranks have different bits"


CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def check_kinds():
    for kind, options in [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.01}),
    ]:
        model = Model()
        optimizer = wrapped(model, kind, options)
        assert isinstance(optimizer, kind)
        assert type(optimizer).__name__ == kind.__name__
        assert type(optimizer) is not kind
        train(optimizer, model, 4)
        equal(model, joined(4, kind=kind, options=options), **CLOSE)


def check_sum():
    model = Model()
    train(wrapped(model, op=hvd.Sum), model, 3)
    equal(model, joined(3, op=hvd.Sum), **CLOSE)


def check_unnamed():
    model = Model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert set(optimizer._parameter_names.values()) == {f"allreduce.noname.0.{n}" for n in range(6)}
    train(optimizer, model, 3)
    equal(model, joined(3), **CLOSE)


def check_passes():
    model = Model()
    optimizer = wrapped(model, backward_passes_per_step=3)
    train(optimizer, model, 3, passes=3)
    equal(model, joined(3, passes=3), **CLOSE)
    # Fewer passes than announced: synchronize submits what is there.
    optimizer.zero_grad()
    loss(model, batches(1)[0][hvd.rank()]).backward()
    optimizer.step()
    # Changed on the way.
    model = Model()
    optimizer = wrapped(model)
    optimizer.set_backward_passes_per_step(2)
    train(optimizer, model, 2, passes=2)
    equal(model, joined(2, passes=2), **CLOSE)


def check_too_many_passes():
    if hvd.size() == 1:
        return
    model = Model()
    optimizer = wrapped(model)
    loss(model, torch.ones(6, 4)).backward()
    with pytest.raises(
        AssertionError, match="more than backward_passes_per_step times before call to step"
    ):
        loss(model, torch.ones(6, 4)).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def check_compression():
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        model = Model()
        train(wrapped(model, compression=compression), model, 3)
        equal(model, joined(3), rtol=tolerance, atol=tolerance)

    class Doubled(hvd.compression.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor * 2, 2

        @staticmethod
        def decompress(tensor, ctx):
            return tensor / ctx

    for groups in (None, 2):
        model = Model()
        train(wrapped(model, compression=Doubled, groups=groups), model, 3)
        equal(model, joined(3), **CLOSE)


def check_predivide():
    for groups in (None, 2):
        model = Model()
        train(wrapped(model, gradient_predivide_factor=float(hvd.size()), groups=groups), model, 3)
        equal(model, joined(3), **CLOSE)


def check_groups():
    expected = joined(3)
    for count in (1, 2, 4, 100):
        model = Model()
        optimizer = wrapped(model, groups=count)
        if hvd.size() > 1:
            assert len(optimizer._group_counts) == min(count, 6)
        train(optimizer, model, 3)
        equal(model, expected, **CLOSE)
    model = Model()
    lists = [list(model.first.parameters()), [model.second.bias, model.unused.weight], []]
    optimizer = wrapped(model, groups=lists)
    if hvd.size() > 1:
        assert sorted(map(len, optimizer._group_counts)) == [1, 1, 2, 2]
    train(optimizer, model, 3)
    equal(model, expected, **CLOSE)
    model = Model()
    with pytest.warns(DeprecationWarning, match="groups="):
        optimizer = wrapped(model, num_groups=2)
    train(optimizer, model, 3)
    equal(model, expected, **CLOSE)
    model = Model()
    train(wrapped(model, groups=2, backward_passes_per_step=2), model, 2, passes=2)
    equal(model, joined(2, passes=2), **CLOSE)


def check_different_order():
    """The ranks' parameters are in another order: names pair them."""
    model = Model()
    named = list(model.named_parameters())
    if hvd.rank() % 2:
        named.reverse()
    for groups in (None, 3):
        model = Model()
        named = list(model.named_parameters())[:: -1 if hvd.rank() % 2 else 1]
        optimizer = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)
        train(hvd.DistributedOptimizer(optimizer, named, groups=groups), model, 3)
        equal(model, joined(3), **CLOSE)


def check_missing_gradients():
    """A layer that only some ranks use in a step."""
    for groups in (None, 1, 3):
        model = Model()
        optimizer = wrapped(model, groups=groups, options={"lr": 1.0})
        before = model.unused.weight.detach().clone()
        value = loss(model, torch.ones(6, 4))
        if hvd.rank() == 0:
            value = value + model.unused(torch.ones(3)).sum()
        value.backward()
        optimizer.step()
        torch.testing.assert_close(before - model.unused.weight, torch.full((3, 3), 1 / hvd.size()))


def check_mixed_dtypes():
    model = Model()
    model.first.double()
    data = torch.ones(6, 4)

    def value(x):
        return (model.second(torch.tanh(model.first(x.double())).float()) ** 2).mean()

    for groups in (None, 1):
        optimizer = wrapped(model, groups=groups)
        value(data * (hvd.rank() + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = torch.cat([p.detach().double().flatten() for p in model.parameters()])
        assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))
        del optimizer


def check_synchronize():
    model, clipped = Model(), 0.05
    optimizer = wrapped(model)
    for x in batches(3):
        optimizer.zero_grad()
        loss(model, x[hvd.rank()]).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipped)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
    alone = Model()
    other = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for xs in batches(3):
        other.zero_grad()
        for x in xs:
            (loss(alone, x) / hvd.size()).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), clipped)
        other.step()
    for p in alone.unused.parameters():
        p.grad = torch.zeros_like(p)
    equal(model, alone, **CLOSE)
    loss(model, torch.ones(6, 4)).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()


def check_closure():
    model = Model()
    optimizer = wrapped(model)
    data = batches(3)
    for x in data:

        def closure(x=x):
            optimizer.zero_grad()
            value = loss(model, x[hvd.rank()])
            value.backward()
            return value

        assert optimizer.step(closure).item() > 0
    equal(model, joined(3), **CLOSE)


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
    optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named, groups=1)
    for _ in range(2):
        optimizer.zero_grad()
        head(table(torch.tensor([hvd.rank()]))).sum().backward()
        optimizer.step()
    whole = torch.cat([p.detach().flatten() for _, p in named])
    assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))


def check_channels_last():
    """Gradients of convolutions in channels_last order, which differs from rank to rank."""
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
    """The wrapper has the optimizer's groups and state, and leaves the optimizer's own hooks alone."""
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
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    loss(model, torch.ones(6, 4)).backward()
    optimizer.step()
    assert calls == ["step", "step"]
    scheduler.step()


def check_custom_optimizer():
    """One whose constructor needs more than the parameters."""

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
    model = Model()
    model.first.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
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


def check_replaced():
    """A dropped wrapper takes its hooks with it, so that the same parameters can be wrapped again."""
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
        warnings.simplefilter("ignore")  # PyTorch's, about reference cycles
        loss(model, batches(1)[0][hvd.rank()]).backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    equal(model, joined(1), **CLOSE)


def check_broken_step():
    """A gradient of another shape on one rank: the step fails everywhere, the next one works."""
    if hvd.size() == 1:
        return
    model = Model()
    extra = torch.nn.Parameter(torch.ones(2 + (hvd.rank() == 0)))
    named = [*model.named_parameters(), ("extra", extra)]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named)
    (loss(model, torch.ones(6, 4)) + extra.sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match="extra"):
        optimizer.step()
    optimizer.zero_grad()
    model = Model()
    train(wrapped(model), model, 2)
    equal(model, joined(2), **CLOSE)


def check_refusals():
    model = Model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for text, arguments in [
        ("pairs", {"named_parameters": model.parameters()}),
        ("more than once: first.weight", {"named_parameters": [*named, named[0]]}),
        (
            r"leaves out.*shape \(2,\)",
            {"named_parameters": [n for n in named if n[0] != "second.bias"]},
        ),
        ("op=Average", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        ("positive", {"groups": 0}),
        ("positive", {"groups": -1}),
        ("list of lists", {"groups": "two"}),
        ("has a str", {"groups": [["first"]]}),
        ("more than once", {"groups": [[model.first.bias], [model.first.bias]]}),
        ("Adasum", {"op": hvd.Adasum}),
    ]:
        with pytest.raises(ValueError, match=text) as caught:
            hvd.DistributedOptimizer(plain, **arguments)
        assert "\n" not in str(caught.value)


CHECKS = [
    check_kinds,
    check_sum,
    check_unnamed,
    check_passes,
    check_too_many_passes,
    check_compression,
    check_predivide,
    check_groups,
    check_different_order,
    check_missing_gradients,
    check_mixed_dtypes,
    check_synchronize,
    check_closure,
    check_sparse_in_group,
    check_channels_last,
    check_shared_state,
    check_custom_optimizer,
    check_frozen_and_added,
    check_replaced,
    check_create_graph,
    check_broken_step,
    check_refusals,
]


@pytest.mark.parametrize("check", CHECKS)
def test_optimizer(ranks, check):
    ranks.run(check)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse(ranks, as_dense):
    ranks.run(check_sparse, as_dense)
