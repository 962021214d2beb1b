"""DistributedOptimizer with each of its options, compared with one process that has the gradients of all ranks."""

import warnings

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture
from tests.harness.training import CLOSE, Model, batches, equal, joined, loss, train, wrapped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "aab")


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
    # With fewer passes than configured, synchronize submits the accumulated gradients.
    optimizer.zero_grad()
    loss(model, batches(1)[0][hvd.rank()]).backward()
    optimizer.step()
    # Change the number of passes between steps.
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
    """The order of the parameters differs between ranks, and names match them."""
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
    """Only some ranks use a layer in a step."""
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
    with pytest.warns(
        UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)"
    ):
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


def check_broken_step():
    """A gradient has another shape on one rank: the step fails on all ranks, and the next one works."""
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
    ]:
        with pytest.raises(ValueError, match=text) as caught:
            hvd.DistributedOptimizer(plain, **arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain))
    for wrong, text in [
        (None, "got None"),
        (model, "got Model"),
        (model.named_parameters(), "got generator"),
        (torch.optim.SGD, "the class SGD; pass an object of it"),
    ]:
        with pytest.raises(TypeError, match=f"takes a torch.optim.Optimizer, .*{text}") as caught:
            hvd.DistributedOptimizer(wrong)
        assert "\n" not in str(caught.value)
        with pytest.raises(
            (TypeError, ValueError), match="broadcast_optimizer_state takes"
        ) as caught:
            hvd.broadcast_optimizer_state(wrong, 0)
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
    check_broken_step,
    check_refusals,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.short("aa-*")
def test_optimizer_equals_training_alone(ranks, check):
    ranks.run(check)


def test_optimizer_is_refused_before_init_and_with_a_set_that_is_not_registered(ranks):
    def check():
        def make(**options):
            model = torch.nn.Linear(2, 1)
            return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)

        with pytest.raises(ValueError, match="is not registered; call add_process_set"):
            make(process_set=hvd.ProcessSet([0]))
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
            make()
        hvd.init()
        make()

    ranks.run(check)
