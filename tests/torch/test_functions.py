"""broadcast_parameters, broadcast_optimizer_state, and objects."""

import pytest
import torch

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture

pytest_plugins = ["tests.harness.jobs"]


ranks = ranks_fixture("a", "aa", "aab")


def network(key):
    torch.manual_seed(key)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 3),
    )


def same_everywhere(value):
    for other in hvd.allgather_object(value):
        torch.testing.assert_close(other, value, rtol=0, atol=0)


def check_parameters():
    root = hvd.size() - 1
    expected = network(root).state_dict()
    forms = {
        "state_dict": lambda m: m.state_dict(),
        "named_parameters": lambda m: m.named_parameters(),
        "list of pairs": lambda m: list(m.named_parameters()),
        "list of tensors": lambda m: list(m.parameters()),
    }
    for form in forms.values():
        model = network(hvd.rank())
        model[1].num_batches_tracked += hvd.rank()
        hvd.broadcast_parameters(form(model), root)
        for name, p in model.named_parameters():
            assert torch.equal(p, expected[name])
    model = network(hvd.rank())
    model[1].running_mean.fill_(hvd.rank())
    model[1].num_batches_tracked += hvd.rank()
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert (model[1].running_mean == root).all()
    assert model[1].num_batches_tracked == root
    model = network(hvd.rank()).to(memory_format=torch.channels_last)
    hvd.broadcast_parameters(model.state_dict(), root)
    assert torch.equal(model[0].weight, expected["0.weight"])
    mixed = {"none": None, "text": "as it is", "tensor": torch.tensor(float(hvd.rank()))}
    hvd.broadcast_parameters(mixed, root)
    assert mixed["tensor"] == root
    hvd.broadcast_parameters([], root)
    for wrong in (None, 3, "text", torch.ones(2)):
        with pytest.raises(ValueError, match="broadcast_parameters takes"):
            hvd.broadcast_parameters(wrong, 0)


@pytest.mark.short("aa")
def test_broadcast_parameters(ranks):
    ranks.run(check_parameters)


KINDS = [
    (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.2}),
    (torch.optim.Adam, {"lr": 0.2, "betas": (0.8, 0.99), "amsgrad": True}),
    (torch.optim.Adam, {"lr": torch.tensor(0.2)}),
    (torch.optim.AdamW, {"lr": 0.2}),
    (torch.optim.RMSprop, {"lr": 0.2, "centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.2}),
    (torch.optim.Rprop, {"lr": 0.2}),
    (torch.optim.ASGD, {"lr": 0.2}),
    (torch.optim.NAdam, {"lr": 0.2}),
]


def check_state(steps_of_root, steps_of_others, wrap):
    """After the broadcast every rank trains exactly like the root."""
    root = hvd.size() - 1
    for kind, options in KINDS:
        mine = dict(options)
        if hvd.rank() != root:
            mine["lr"] = options["lr"] * 3
        model = network(0)
        first, *rest = list(model.parameters())
        optimizer = kind([{"params": [first]}, {"params": rest, "lr": mine["lr"] / 2}], **mine)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        step = super(type(optimizer), optimizer).step if wrap else optimizer.step
        for _ in range(steps_of_root if hvd.rank() == root else steps_of_others):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + hvd.rank())
            if wrap:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                step()
        before = [p.detach().clone() for p in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root, model=model)
        for p, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, old), "parameters are not to be touched"
        same_everywhere(optimizer.state_dict())
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)
        assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(0.1)
        hvd.broadcast_parameters(model.state_dict(), root)
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        same_everywhere(optimizer.state_dict())
        same_everywhere(model.state_dict())


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize(("root", "others"), [(0, 0), (2, 0), (0, 2), (3, 1)])
@pytest.mark.short("aa-*")
def test_broadcast_optimizer_state(ranks, root, others, wrap):
    ranks.run(check_state, root, others, wrap)


class Counted(torch.optim.SGD):
    """Has state that belongs to no parameter, as MADGRAD, LARS and others have."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", torch.tensor([0])) + 1
        self.state["past"] = {"steps": [int(self.state["k"])]}
        return super().step(closure)


def check_own_state():
    root = hvd.size() - 1
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = Counted(table.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3 if hvd.rank() == root else 1):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank()])).sum().backward()
        optimizer.step()
    if hvd.rank() != root:
        optimizer.state["only here"] = 1
    hvd.broadcast_optimizer_state(optimizer, root)
    assert optimizer.state["k"].tolist() == [3]
    assert optimizer.state["past"] == {"steps": [3]}
    assert "only here" not in optimizer.state
    momentum = optimizer.state[table.weight]["momentum_buffer"]
    assert momentum.is_sparse
    same_everywhere(momentum.to_dense())
    assert momentum.to_dense()[root].abs().sum() > 0
    optimizer.step()
    assert optimizer.state["k"].tolist() == [4]


def test_state_under_names_and_sparse_state_are_broadcast(ranks):
    ranks.run(check_own_state)


def check_lbfgs():
    model = network(0)
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    optimizer = torch.optim.SGD(list(model.parameters())[hvd.rank() :], lr=1.0)
    if hvd.rank() == 0:
        hvd.broadcast_optimizer_state(optimizer, 0)
    else:
        with pytest.raises(ValueError, match="rank 0 has 6 parameters in 1 groups, this one"):
            hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.barrier()


@pytest.mark.short(failure=True)
def test_unsupported_optimizer_state_is_refused(ranks):
    ranks.run(check_lbfgs)


def check_scheduler():
    """A scheduler created before the broadcast still works, because parameter groups are changed in place."""
    model = network(0)
    plain = torch.optim.SGD(model.parameters(), lr=1.0 + hvd.rank(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, 0)
    plain.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_scheduler_works_after_broadcast_of_the_optimizer_state(ranks):
    ranks.run(check_scheduler)


def check_objects():
    rank, size = hvd.rank(), hvd.size()
    state = {"epoch": rank, "weights": torch.full((3,), float(rank))}
    got = hvd.broadcast_object(state, root_rank=size - 1, name="state")
    assert got["epoch"] == size - 1
    assert (got["weights"] == size - 1).all()
    assert [o["epoch"] for o in hvd.allgather_object(state)] == list(range(size))


@pytest.mark.short("aa")
def test_broadcast_and_allgather_of_objects(ranks):
    ranks.run(check_objects)
