"""A model, its training on this rank, and the same training in one process with the gradients of all ranks."""

import torch

import horoplug.torch as hvd


class Model(torch.nn.Module):
    """Two layers that are used, and one that is never used."""

    def __init__(self, key=0):
        super().__init__()
        torch.manual_seed(key)
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 2)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def batches(count, key=1):
    """The batches of all ranks, as one tensor (count, ranks, rows, 4)."""
    return torch.randn(count, hvd.size(), 6, 4, generator=torch.Generator().manual_seed(key))


def loss(model, x):
    return (model(x) ** 2).mean()


def wrapped(model, kind=torch.optim.SGD, options=None, **more):
    options = options or {"lr": 0.1, "momentum": 0.9}
    optimizer = kind(model.parameters(), **options)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **more)


def joined(steps, passes=1, op=hvd.Average, options=None, kind=torch.optim.SGD, data=None):
    """The parameters after training in one process with the gradients of all ranks."""
    model = Model()
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1, "momentum": 0.9}))
    data = batches(steps * passes) if data is None else data
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(passes):
            for x in data[step * passes + n]:
                factor = 1 / hvd.size() if op == hvd.Average else 1
                (loss(model, x) * factor).backward()
        if hvd.size() > 1:  # the wrapper replaces missing gradients by zeros
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
