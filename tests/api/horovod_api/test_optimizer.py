"""DistributedOptimizer."""

import itertools
import warnings

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F

from tests.api.horovod_api.matrix import equal
from tests.api.horovod_api.optimizers import OPTIMIZERS, OPTIONS, build

pytestmark = pytest.mark.shared_job


def linear(value=0.5, bias=True):
    model = torch.nn.Linear(1, 1, bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def wrapped(model, lr=1.0, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def mean_of_ranks():
    """The mean of rank + 1 over the ranks."""
    return (hvd.size() + 1) / 2


def backward(model, factor=1.0):
    """A gradient of ``factor * (rank + 1)`` for a linear model's weight."""
    model(torch.full((1, 1), factor * (1.0 + hvd.rank()))).sum().backward()


# ---- class and names ------------------------------------------------------------------------------------------------


def test_optimizer_class_and_attributes():
    plain = torch.optim.Adam(linear().parameters(), lr=0.25)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert type(optimizer) is not torch.optim.Adam
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["params"][0] is plain.param_groups[0]["params"][0]


def test_gradient_names_contain_parameter_names():
    model = linear()
    optimizer = wrapped(model)
    assert optimizer._parameter_names == {model.weight: "weight", model.bias: "bias"}


def test_generated_names_are_unique_and_equal_on_every_rank():
    """The optimizer generates names that are unique and the same on every rank."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer)
    names = optimizer._parameter_names
    assert len(names) == 4
    assert len(set(names.values())) == 4
    assert hvd.allgather_object(set(names.values())) == [set(names.values())] * hvd.size()
    model(torch.rand(3, 10)).sum().backward()
    optimizer.step()


def test_step_takes_and_returns_the_loss_of_a_closure():
    model = linear(bias=False)
    optimizer = wrapped(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((1, 1), 1.0 + hvd.rank())).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(0.5 * (1 + hvd.rank()))
    assert model.weight.item() == pytest.approx(0.5 - mean_of_ranks())


# ---- invalid arguments ----------------------------------------------------------------------------------------------


@pytest.mark.no_job
def test_duplicate_names_are_refused():
    """Duplicate names are reported even without init()."""
    first, second = torch.nn.Conv2d(1, 1, 1), torch.nn.Conv2d(1, 1, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    named = itertools.chain(first.named_parameters(), second.named_parameters())
    with pytest.raises(ValueError, match="weight"):
        hvd.DistributedOptimizer(optimizer, named_parameters=named)


def test_missing_names_are_refused():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 100, 1), torch.nn.Conv2d(100, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="named_parameters"):
        hvd.DistributedOptimizer(optimizer, named_parameters=list(model.named_parameters())[:1])


def test_named_parameters_must_be_pairs():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="named_parameters"):
        hvd.DistributedOptimizer(optimizer, named_parameters=model.parameters())


def test_predivide_factor_needs_average():
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        wrapped(linear(), op=hvd.Sum, gradient_predivide_factor=2.0)


def invalid_groups(model):
    weight, bias = model.parameters()
    return {
        "no groups": 0,
        "negative": -1,
        "text": "two",
        "twice": [[weight, bias], [bias]],
        "no tensors": [[weight, 3]],
    }


@pytest.mark.parametrize("case", ["no groups", "negative", "text", "twice", "no tensors"])
def test_invalid_groups_are_refused(case):
    model = linear()
    with pytest.raises(ValueError, match="groups"):
        wrapped(model, groups=invalid_groups(model)[case])


# ---- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_on_all_data(name, options):
    """Ranks that average their gradients train like one process with the mean of their losses, for every optimizer."""
    model, optimizer = build(name, OPTIONS[options])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reference, plain = build(name, OPTIONS[options], wrap=False)
    reference.load_state_dict(model.state_dict())
    for step in range(3):
        data = [torch.Generator().manual_seed(10 * step + r) for r in range(hvd.size())]
        pairs = [(torch.randn(8, 20, generator=g), torch.randn(8, 10, generator=g)) for g in data]
        optimizer.zero_grad()
        F.mse_loss(model(pairs[hvd.rank()][0]), pairs[hvd.rank()][1]).backward()
        optimizer.step()
        plain.zero_grad()
        (sum(F.mse_loss(reference(x), y) for x, y in pairs) / hvd.size()).backward()
        plain.step()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # Rprop and others use the signs of gradients, which may differ for gradients close to zero.
        close = torch.isclose(mine, expected, rtol=1e-3, atol=1e-4).float().mean()
        assert close > 0.98
    state = [parameter.detach() for parameter in model.parameters()]
    for other in hvd.allgather_object(state):
        for mine, theirs in zip(state, other, strict=True):
            equal(mine, theirs)


@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def test_optimizer_with_every_op(op):
    model = linear(bias=False)
    optimizer = wrapped(model, op=getattr(hvd, op))
    backward(model)
    optimizer.step()
    values = torch.arange(1.0, hvd.size() + 1)
    expected = {
        "Average": values.mean(),
        "Sum": values.sum(),
        "Min": values.min(),
        "Max": values.max(),
        "Product": values.prod(),
    }[op]
    assert model.weight.grad.item() == pytest.approx(expected.item())
    assert model.weight.item() == pytest.approx(0.5 - expected.item())


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 8.0])
def test_predivide_factor_changes_only_rounding(factor):
    model = linear(bias=False)
    optimizer = wrapped(model, gradient_predivide_factor=factor)
    backward(model)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.5 - mean_of_ranks())


def test_optimizer_with_fp16_compression():
    model = linear(bias=False)
    optimizer = wrapped(model, compression=hvd.Compression.fp16)
    backward(model)
    optimizer.step()
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.item() == pytest.approx(0.5 - mean_of_ranks())


def test_gradients_present_on_some_ranks_only():
    """Every parameter is reduced in every step; a rank without a gradient contributes zero."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = F.relu(self.fc1(x))
            first = self.fc2(x)
            return first, self.fc3(F.relu(first))

    for name in OPTIMIZERS:
        if name == "Muon":  # supports no vectors
            continue
        model = Net()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.2)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        outputs = model(torch.ones(2, 4))
        optimizer.zero_grad()
        outputs[0 if hvd.rank() == 0 else 1].sum().backward()
        optimizer.step()
        assert model.fc3.weight.grad is not None
        for other in hvd.allgather_object([p.detach() for p in model.parameters()]):
            for mine, theirs in zip(model.parameters(), other, strict=True):
                equal(mine.detach(), theirs)


def test_gradients_absent_on_all_ranks_become_zeros():
    model = linear()
    optimizer = wrapped(model)
    optimizer.step()
    equal(model.weight.grad, torch.zeros(1, 1))


def test_requires_grad_changes_between_steps():
    """As in a GAN, the parameters of two optimizers are frozen and unfrozen in turn between steps."""
    generator, discriminator = torch.nn.Conv2d(1, 10, 1), torch.nn.Conv2d(10, 1, 1)
    optimizers = {
        model: hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for model in (generator, discriminator)
    }
    image = torch.rand(1, 1, 100, 100)
    for _ in range(10):
        for trained in optimizers:
            for model, optimizer in optimizers.items():
                model.requires_grad_(model is trained)
                optimizer.zero_grad()
            discriminator(generator(image)).sum().backward()
            for model in optimizers:
                for parameter in model.parameters():
                    has = parameter.grad is not None and bool(parameter.grad.max().is_nonzero())
                    assert has == (model is trained)
            optimizers[trained].step()


def test_parameters_without_requires_grad():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = wrapped(model)
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    assert model[0].weight.grad is None


# ---- synchronize ----------------------------------------------------------------------------------------------------


def test_gradient_clipping_between_synchronize_and_step():
    """synchronize, clip, then step inside of skip_synchronize: the step uses the clipped gradient."""
    model = linear()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped(model, lr=0.1)
    optimizer.zero_grad()
    F.mse_loss(model(torch.ones(1, 1)), torch.full((1, 1), 3.0)).backward()
    optimizer.synchronize()
    before = model.weight.grad.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = model.weight.grad.item()
    assert abs(before) > abs(clipped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    assert model.weight.grad.item() == clipped
    assert model.weight.item() == pytest.approx(0.5 - 0.1 * clipped)


def test_step_after_synchronize_warns():
    model = linear()
    optimizer = wrapped(model)
    backward(model)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(seen) == 1
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(seen[0].message)


def test_step_alone_does_not_warn():
    model = linear()
    optimizer = wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()


def test_zero_grad_while_gradients_are_in_flight_is_refused():
    model = linear()
    optimizer = wrapped(model)
    backward(model)
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_too_many_backward_passes_are_refused():
    model = linear()
    optimizer = wrapped(model)
    backward(model)
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        backward(model)
    optimizer.synchronize()


def test_backward_passes_per_step_sums_gradients():
    """The sum of the passes is reduced, without division by their number."""
    model = linear(bias=False)
    optimizer = wrapped(model, backward_passes_per_step=3)
    for step in (1, 2):
        optimizer.zero_grad()
        for _ in range(3):
            backward(model)
        optimizer.step()
        assert model.weight.item() == pytest.approx(0.5 - step * 3 * mean_of_ranks())


def test_step_before_the_last_backward_pass():
    model = linear(bias=False)
    optimizer = wrapped(model, backward_passes_per_step=3)
    backward(model)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.5 - mean_of_ranks())


def test_set_backward_passes_per_step():
    model = linear(bias=False)
    optimizer = wrapped(model)
    optimizer.set_backward_passes_per_step(2)
    backward(model)
    backward(model)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.5 - 2 * mean_of_ranks())


def test_load_state_dict_of_a_plain_optimizer():
    """The state of a plain optimizer can be loaded, and training continues."""
    model = linear(bias=False)
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    backward(model)
    optimizer.step()
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.5 - 2.5 * mean_of_ranks())


def test_learning_rate_scheduler():
    model = linear(bias=False)
    optimizer = wrapped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            scheduler.step()
    assert model.weight.item() == pytest.approx(0.5 - 1.5 * mean_of_ranks())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)


# ---- groups ---------------------------------------------------------------------------------------------------------


def check_groups(model, optimizer):
    """Check that two steps equal those of a plain optimizer on the mean of the ranks' losses."""
    reference = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        plain.zero_grad()
        losses = [reference(torch.full((2, 3), 1.0 + r)).sum() for r in range(hvd.size())]
        (sum(losses) / hvd.size()).backward()
        plain.step()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 100, "lists", "one list", "empty"])
def test_groups_do_not_change_results(groups):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    layers = [list(layer.parameters()) for layer in model]
    lists = {"lists": layers, "one list": layers[1:2], "empty": []}
    check_groups(model, wrapped(model, lr=0.1, groups=lists.get(groups, groups)))


def test_num_groups_is_deprecated():
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        optimizer = wrapped(model, lr=0.1, num_groups=2)
    check_groups(model, optimizer)


def test_groups_with_gradients_present_on_some_ranks_only():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrapped(model, groups=1)
    model[hvd.rank() % 2](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for other in hvd.allgather_object([p.detach() for p in model.parameters()]):
        for mine, theirs in zip(model.parameters(), other, strict=True):
            equal(mine.detach(), theirs)
