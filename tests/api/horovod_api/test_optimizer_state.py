"""broadcast_optimizer_state, for every optimizer that PyTorch has."""

import copy

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F

from tests.api.horovod_api.matrix import equal
from tests.api.horovod_api.optimizers import OPTIMIZERS, OPTIONS, accepted, build, network

pytestmark = pytest.mark.shared_job

OF_ROOT = {
    "lr": 0.1,
    "momentum": 0.8,
    "weight_decay": 0.2,
    "nesterov": True,
    "betas": (0.9, 0.999),
    "etas": (0.8, 2.4),
    "step_sizes": (1e-5, 100),
}
OF_OTHERS = {
    "lr": 0.2,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "nesterov": False,
    "betas": (0.8, 0.9),
    "etas": (0.25, 1.75),
    "step_sizes": (1e-7, 5),
}


def train(model, optimizer):
    torch.manual_seed(50 + hvd.rank())
    optimizer.zero_grad()
    F.mse_loss(model(torch.randn(8, 20)), torch.randn(8, 10), reduction="sum").backward()
    optimizer.step()


def flat(optimizer):
    """The state as (parameter, name, value), in a fixed order."""
    state = optimizer.state_dict()["state"]
    return [
        (number, *item) for number, entry in sorted(state.items()) for item in sorted(entry.items())
    ]


def check_equal(mine, roots):
    assert [entry[:2] for entry in mine] == [entry[:2] for entry in roots]
    for (_, _, value), (_, _, expected) in zip(mine, roots, strict=True):
        assert type(value) is type(expected)
        if torch.is_tensor(value):
            equal(value, expected)
        else:
            assert value == expected


@pytest.mark.parametrize("wrap", [True, False], ids=["wrapped", "bare"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_a_checkpoint_reaches_all_ranks(name, options, wrap):
    """Only the root has loaded a checkpoint; the others get its parameters and the complete state."""
    model, optimizer = build(name, OPTIONS[options])
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = build(name, OPTIONS[options], wrap)
    if hvd.rank() == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    roots_model, roots_state = hvd.broadcast_object((dict(model.state_dict()), flat(optimizer)))

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for key, tensor in model.state_dict().items():
        equal(tensor, roots_model[key])
    check_equal(flat(optimizer), roots_state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_of_the_root_are_broadcast(name):
    """Options such as lr and betas equal the root's, keep their types, and are used in training."""
    model, optimizer = build(name, OF_ROOT if hvd.rank() == 0 else OF_OTHERS)
    train(model, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    for key, expected in accepted(getattr(torch.optim, name), OF_ROOT).items():
        assert type(group[key]) is type(expected)
        if isinstance(expected, tuple):
            assert [type(value) for value in group[key]] == [type(value) for value in expected]
        assert group[key] == pytest.approx(expected)
    train(model, optimizer)


def test_options_of_every_parameter_group_are_broadcast():
    model = network("SGD")
    scale = 1.0 + hvd.rank()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1 * scale},
        {"params": model[2].parameters(), "lr": 0.2 * scale, "momentum": 0.5 * scale},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.2])
    assert [group["momentum"] for group in optimizer.param_groups] == pytest.approx([0.9, 0.5])


def test_options_of_any_type_are_broadcast():
    """None, bool and str as well as numbers, and a key that only the root has."""
    model = network("SGD")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        optimizer.param_groups[0].update(foreach=False, nesterov=True, initial_lr=0.7, tag="root")
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    assert (group["foreach"], group["nesterov"], group["initial_lr"], group["tag"]) == (
        False,
        True,
        0.7,
        "root",
    )
    assert group["fused"] is None


def test_state_of_another_root():
    model, optimizer = build("Adam", {"lr": 0.1 * (1 + hvd.rank())})
    train(model, optimizer)
    expected = hvd.broadcast_object(flat(optimizer), 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    check_equal(flat(optimizer), expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_broadcast_keeps_group_and_parameter_objects():
    """Schedulers and wrappers hold references to the groups and parameters."""
    model, optimizer = build("SGD", OPTIONS["full"])
    groups, parameters = optimizer.param_groups, list(model.parameters())
    group = groups[0]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups is groups
    assert groups[0] is group
    for mine, theirs in zip(group["params"], parameters, strict=True):
        assert mine is theirs


def test_broadcast_before_training_makes_gradients_zero():
    """Horovod initialises an optimizer without state by a step with zero gradients. These remain, except that
    parameters without requires_grad have none."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(
                torch.tensor([1, 3], dtype=torch.int32), requires_grad=False
            )
            self.b = torch.nn.Parameter(torch.rand(4))

    model = Model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.001, weight_decay=1e-6, momentum=0.9, nesterov=True
    )
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model.a.grad is None
    grad = model.b.grad
    equal(grad, torch.zeros(4))
    equal(hvd.broadcast(grad, root_rank=0), grad)


def test_broadcast_before_training_keeps_parameters():
    model, optimizer = build("AdamW", {"lr": 0.5, "weight_decay": 0.5})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter, old in zip(model.parameters(), before, strict=True):
        equal(parameter.detach(), old)


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
@pytest.mark.parametrize("pass_model", [True, False])
def test_state_of_sparse_embeddings(kind, pass_model):
    """Before training and after it, with ``model=`` and without."""
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    lr = 0.1 * (1 + hvd.rank())
    optimizer = getattr(torch.optim, kind)(list(embedding.parameters()), lr=lr)
    model = embedding if pass_model or kind == "SGD" else None
    hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    for _ in range(2):  # without zero_grad
        embedding(torch.tensor([[1, 2], [3, hvd.rank()]])).sum().backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    expected = hvd.broadcast_object(flat(optimizer))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    check_equal(flat(optimizer), expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_lbfgs_is_refused():
    model = network("LBFGS")
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)
