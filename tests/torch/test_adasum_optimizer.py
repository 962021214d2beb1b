"""DistributedOptimizer(op=Adasum) compared with a reference: every rank steps separately, and Adasum combines the
steps."""

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.adasum_reference import adasum
from tests.harness.support import ranks_fixture
from tests.harness.training import Model, batches, equal, loss, wrapped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "ab", "aaaa")

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def data(count):
    return batches(count).double()


def expected(steps, kind=torch.optim.SGD, options=None, passes=1, every=1):
    """The parameters after training with one model and one optimizer for each rank, all in this process. ``every``:
    only ranks that are multiples of it have a gradient for the layer ``unused``."""
    models = [Model().double() for _ in range(hvd.size())]
    optimizers = [kind(m.parameters(), **(options or MOMENTUM)) for m in models]
    inputs = data(steps * passes)
    for step in range(steps):
        starts = [p.detach().clone() for p in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for n in range(passes):
                of_rank(model, inputs[step * passes + n][rank], rank, every).backward()
            optimizer.step()
        with torch.no_grad():
            for place, start in enumerate(starts):
                of_ranks = [list(model.parameters())[place] for model in models]
                moved = start + torch.from_numpy(adasum([(p - start).numpy() for p in of_ranks]))
                for parameter in of_ranks:
                    parameter.copy_(moved)
    return models[0]


def of_rank(model, x, rank, every):
    value = loss(model, x)
    if every > 1 and rank % every == 0:
        value = value + (model.unused(x[:, :3]) ** 2).mean()
    return value


def train(optimizer, model, steps, passes=1, every=1):
    inputs = data(steps * passes)
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(passes):
            of_rank(model, inputs[step * passes + n][hvd.rank()], hvd.rank(), every).backward()
        optimizer.step()


def adasum_optimizer(model, kind=torch.optim.SGD, options=None, **more):
    return wrapped(model, kind, options or MOMENTUM, op=hvd.Adasum, **more)


def check_kinds():
    for kind, options in [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, MOMENTUM),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ]:
        model = Model().double()
        optimizer = adasum_optimizer(model, kind, options)
        assert isinstance(optimizer, kind)
        assert type(optimizer).__name__ == kind.__name__
        assert type(optimizer) is not kind
        train(optimizer, model, 4)
        equal(model, expected(4, kind, options), **CLOSE)


def check_groups_of_parameters():
    model = Model().double()
    groups = [
        {"params": model.first.parameters(), "lr": 0.05},
        {"params": [*model.second.parameters(), *model.unused.parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    before = [list(group["params"]) for group in optimizer.param_groups]
    train(optimizer, model, 1)
    assert [list(group["params"]) for group in optimizer.param_groups] == before
    other = expected(1, options={"lr": 0.1})
    with torch.no_grad():
        for p, start in zip(
            other.first.parameters(), Model().double().first.parameters(), strict=True
        ):
            p.copy_((p + start) / 2)
    equal(model, other, **CLOSE)


def check_passes():
    model = Model().double()
    optimizer = adasum_optimizer(model, backward_passes_per_step=2)
    train(optimizer, model, 3, passes=2)
    equal(model, expected(3, passes=2), **CLOSE)
    # With fewer passes than configured, step submits the accumulated gradients.
    model = Model().double()
    optimizer = adasum_optimizer(model, backward_passes_per_step=5)
    train(optimizer, model, 3, passes=2)
    equal(model, expected(3, passes=2), **CLOSE)
    # More passes than configured.
    optimizer.set_backward_passes_per_step(1)
    x = data(1)[0][hvd.rank()]
    loss(model, x).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss(model, x).backward()
    optimizer.step()


def check_missing_gradients():
    model = Model().double()
    train(adasum_optimizer(model), model, 3, every=2)
    equal(model, expected(3, every=2), **CLOSE)


def check_parameters_move_in_step_only():
    model = Model().double()
    optimizer = adasum_optimizer(model)
    start = [p.detach().clone() for p in model.parameters()]
    loss(model, data(1)[0][hvd.rank()]).backward()
    for p, before in zip(model.parameters(), start, strict=True):
        assert torch.equal(p, before)
    optimizer.step()
    assert not torch.equal(model.first.weight, start[0])


def check_closure():
    model = Model().double()
    optimizer = adasum_optimizer(model)
    for x in data(3):

        def closure(x=x):
            optimizer.zero_grad()
            value = loss(model, x[hvd.rank()])
            value.backward()
            return value

        assert optimizer.step(closure) > 0
    equal(model, expected(3), **CLOSE)


def check_step_hooks():
    model = Model().double()
    optimizer = adasum_optimizer(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(optimizer, model, 2)
    assert calls == ["before", "after"] * 2


def check_schedule():
    model = Model().double()
    optimizer = adasum_optimizer(model, options={"lr": 0.1})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    train(optimizer, model, 1)
    schedule.step()
    still = [p.detach().clone() for p in model.parameters()]
    train(optimizer, model, 1)
    for p, before in zip(model.parameters(), still, strict=True):
        assert torch.equal(p, before)


def check_compression():
    model = Model().double()
    train(adasum_optimizer(model, compression=hvd.Compression.fp16), model, 2)
    equal(model, expected(2), rtol=1e-2, atol=1e-3)


def check_refusals():
    model = Model().double()
    optimizer = adasum_optimizer(model)
    with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    loss(model, data(1)[0][hvd.rank()]).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    with pytest.raises(ValueError, match="op=Average"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            op=hvd.Adasum,
            gradient_predivide_factor=2.0,
        )


def check_state():
    """Momentum is local, and training continues from a loaded state."""
    model = Model().double()
    optimizer = adasum_optimizer(model)
    train(optimizer, model, 1)
    momentum = optimizer.state[model.first.weight]["momentum_buffer"].numpy().tobytes()
    assert len(set(hvd.allgather_object(momentum))) == hvd.size()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": torch.nn.Linear(2, 2).double().parameters()})
    inputs = data(3)[1:]
    for x in inputs:
        optimizer.zero_grad()
        loss(model, x[hvd.rank()]).backward()
        optimizer.step()
    equal(model, expected(3), **CLOSE)


def check_learning():
    torch.manual_seed(hvd.rank())
    model = Model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), op=hvd.Adasum
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    target = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0], [1.0, 0.0]])

    def error(x):
        return ((model(x) - torch.tanh(x @ target)) ** 2).mean()

    test = torch.randn(200, 4, generator=torch.Generator().manual_seed(99))
    before = error(test).item()
    for _ in range(60):
        optimizer.zero_grad()
        error(torch.randn(16, 4)).backward()
        optimizer.step()
    assert error(test).item() < before / 4


CHECKS = [
    check_kinds,
    check_groups_of_parameters,
    check_passes,
    check_missing_gradients,
    check_parameters_move_in_step_only,
    check_closure,
    check_step_hooks,
    check_schedule,
    check_compression,
    check_refusals,
    check_state,
    check_learning,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.short("aa-*")
def test_adasum_optimizer_matches_the_reference(ranks, check):
    ranks.run(check)


def check_alone():
    model = Model().double()
    optimizer = adasum_optimizer(model)
    train(optimizer, model, 3)
    equal(model, expected(3), **CLOSE)
    with optimizer.skip_synchronize():  # the ordinary optimizer
        optimizer.step()


def test_adasum_optimizer_on_one_rank(pool):
    with pool.ranks(1) as ranks:
        ranks.run(check_alone)
