"""The time that a commit needs to copy the state of a model and its optimizer (Adam), beside ``copy.deepcopy``.

    python benchmarks/commit.py --model resnet50 --model bert-large

``deepcopy`` is what Horovod's TorchState does at each commit. Both copies take turns on one rank. ``state`` is the size
of the parameters and of the optimizer's state; ``bandwidth`` is ``state`` over the median.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import torch
from harness import models
from harness.clock import Summary, alternate
from harness.job import command_line, job, options_of, parse
from harness.record import Column, Plot, Record

ABOUT = """The time that TorchState.save() needs for a model and its optimizer (Adam), beside copy.deepcopy, which is
what Horovod's TorchState does. The state is that of the parameters and of the optimizer."""

COLUMNS = {
    "model": Column("model", width=12),
    "way": Column("copied by", width=10),
    "state": Column("state", "MB", ".1f"),
    "median": Column("median", "ms", ".2f"),
    "p99": Column("p99", "ms", ".2f"),
    "bandwidth": Column("bandwidth", "GB/s", ".2f"),
    "spread": Column("spread", "", ".0%", 7),
    "ratio": Column("ratio", "deepcopy", ".2f"),
    "wrong": Column("wrong", "", "d", 6),
}
PLOTS = [Plot("bars", "model", "bandwidth", "way")]


def trained(model: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with gradients of zero, and its optimizer after a step."""
    module = torch.nn.ParameterList(torch.randn(shape) for shape in models.gradients(model))
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def differences(state: Any, module: torch.nn.Module) -> int:
    """The number of parameters that a restored state does not have. Changes them."""
    expected = [parameter.detach().clone() for parameter in module.parameters()]
    state.save()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    state.restore()
    found = module.parameters()
    return sum(not torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def measure(record: Record, hvd: Any, state_of: Any, model: str, iterations: int) -> None:
    module, optimizer = trained(model)
    state = state_of(module, optimizer)
    kept: list[Any] = [None, None]

    def deepcopy() -> None:
        kept[0] = copy.deepcopy(module.state_dict())
        kept[1] = copy.deepcopy(optimizer.state_dict())

    times = alternate(hvd, [state.save, deepcopy], iterations)
    saved, copied = map(Summary.of, times)
    megabytes = 12 * models.elements(models.gradients(model)) / 1e6  # float32, and two more of Adam
    rest = {"model": model, "state": megabytes}
    for way, summary in (("TorchState", saved), ("deepcopy", copied)):
        record.row(
            **rest,
            way=way,
            median=1e3 * summary.median,
            p99=1e3 * summary.p99,
            bandwidth=megabytes / 1e3 / summary.median,
            spread=summary.spread,
            ratio=copied.median / summary.median,
            wrong=differences(state, module) if way == "TorchState" else None,
        )


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--model", action="append", help="as in gradients.py [resnet50]")
    add("-n", "--iterations", type=int, default=50, help="commits of each way [50]")
    args: argparse.Namespace = parse(parser)
    args.model = args.model or ["resnet50"]
    with job(args) as (own, _):
        import horoplug.torch as hvd

        record = Record(
            "commit",
            "commits of a state, 1 rank",
            ABOUT,
            COLUMNS,
            PLOTS,
            ranks=own.hvd.size(),
            options=options_of(args),
            speaks=own.hvd.rank() == 0,
        )
        for model in args.model:
            measure(record, own.hvd, hvd.elastic.TorchState, model, args.iterations)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
