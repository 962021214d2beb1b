"""Every optimizer of PyTorch, its options, and a model that it trains."""

import inspect

import horovod.torch as hvd
import torch

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
)

OPTIONS = {
    "full": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "centered": True},
    "plain": {"lr": 0.2},
}


def accepted(kind, options):
    names = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in options.items() if key in names}


def network(name):
    bias = name != "Muon"  # Muon supports matrices only
    return torch.nn.Sequential(
        torch.nn.Linear(20, 10, bias=bias), torch.nn.ReLU(), torch.nn.Linear(10, 10, bias=bias)
    )


def build(name, options, wrap=True):
    """A model and its optimizer, different on every rank."""
    kind = getattr(torch.optim, name)
    torch.manual_seed(hvd.rank())
    model = network(name)
    optimizer = kind(model.parameters(), **accepted(kind, options))
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    return model, optimizer
