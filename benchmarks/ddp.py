"""A step of DistributedDataParallel by the size of the gradients, on the backends of torch.distributed.

    python benchmarks/ddp.py -np 2 --peer torch-horoplug --peer torch-gloo

The model has almost no computation, so that the step shows what the reduction costs: forward, backward with the
reduction, and nothing else. Its gradients, float32, are of one of several sizes, in 8 tensors, and DDP puts them into
its own buckets: the first of 1 MiB, all others of 25 MiB. Variants:

horoplug        ``DistributedOptimizer``, without the step of the optimizer
torch-gloo      ``DistributedDataParallel(gradient_as_bucket_view=True)`` on Gloo
torch-horoplug  the same on ``torch.distributed``'s backend horoplug
alone           the same model without a reduction
alone, DDP      in DDP, with a hook that sends nothing: what DDP itself costs

``ratio`` is the median over that of torch-horoplug. The check: the gradients are the mean of those of the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from harness.clock import Summary, alternate
from harness.job import command_line, job, options_of, parse
from harness.peers import Peer
from harness.record import Column, Plot, Record
from torch.nn.parallel import DistributedDataParallel

from horoplug.bench.cases import byte_count, sizes

ABOUT = """Forward and backward of a model with almost no computation, whose gradients (float32, in 8 tensors) are
reduced in the buckets of DistributedDataParallel on a backend of torch.distributed, or by horoplug's
DistributedOptimizer. Ratio: to the backend horoplug."""

COLUMNS = {
    "size": Column("size", "B", width=10),
    "variant": Column("variant", width=14),
    "iterations": Column("n", width=5),
    "time": Column("time", "µs", ".1f", 11),
    "p99": Column("p99", "µs", ".1f", 11),
    "spread": Column("spread", "%", ".0f", 6),
    "ratio": Column("ratio", "x", ".2f", 7),
    "wrong": Column("#wrong", width=6),
}

TENSORS = 8
OWN = "torch-horoplug"


class Model(torch.nn.Module):
    """Its output does not depend on most of its parameters; the gradients of all are dense."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(
            torch.zeros(nbytes // TENSORS // 4) for _ in range(TENSORS)
        )

    def forward(self, scale: float) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum() * scale


class Variant(NamedTuple):
    name: str
    model: Model
    step: Callable[[float], None]
    """Leaves the gradients, which are the argument on each rank, reduced."""


def alone(nbytes: int) -> Variant:
    model = Model(nbytes)
    return Variant("alone", model, lambda scale: model(scale).backward())


def with_optimizer(nbytes: int) -> Variant:
    import horoplug.torch as hvd

    model = Model(nbytes)
    named = [(f"{nbytes}.{name}", p) for name, p in model.named_parameters()]
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer: Any = hvd.DistributedOptimizer(plain, named, gradient_as_bucket_view=True)

    def step(scale: float) -> None:
        model(scale).backward()
        optimizer.synchronize()

    return Variant("horoplug", model, step)


def with_ddp(peer: Any, nbytes: int, reduces: bool = True) -> Variant:
    model = Model(nbytes)
    ddp: Any = DistributedDataParallel(
        model, process_group=peer.group, gradient_as_bucket_view=True
    )
    if not reduces:
        ddp.register_comm_hook(None, keep_bucket)
    name = peer.name if reduces else "alone, DDP"
    return Variant(name, model, lambda scale: ddp(scale).backward())


def keep_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def step_of(variant: Variant, scale: float = 0.0) -> None:
    variant.model.zero_grad(set_to_none=False)
    variant.step(scale)


def wrong_elements(hvd: Any, variant: Variant) -> int:
    """The number of wrong elements of the gradients after a step, summed over all ranks."""
    step_of(variant, 1.0)  # DDP makes its buckets anew after the first step
    step_of(variant, 1.0 + hvd.rank())
    right = 1.0 + (hvd.rank() if variant.name.startswith("alone") else (hvd.size() - 1) / 2)
    wrong = sum(int((p.grad != right).sum()) for p in variant.model.parameters())
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])


def measure(args: Any, hvd: Any, peers: list[Peer], nbytes: int, record: Record) -> None:
    variants = [
        alone(nbytes),
        *(with_ddp(peer, nbytes, reduces=False) for peer in peers[:1]),
        with_optimizer(nbytes),
        *(with_ddp(peer, nbytes) for peer in peers),
    ]
    wrong = [wrong_elements(hvd, variant) for variant in variants]
    iterations = args.iterations or min(400, max(20, 2**31 // (nbytes + 2**20)))
    runs = [lambda variant=variant: step_of(variant) for variant in variants]
    times = [Summary.of(seconds) for seconds in alternate(hvd, runs, iterations)]
    by_name = {variant.name: time for variant, time in zip(variants, times, strict=True)}
    for variant, time, bad in zip(variants, times, wrong, strict=True):
        record.row(
            size=nbytes,
            variant=variant.name,
            iterations=iterations,
            time=time.median * 1e6,
            p99=time.p99 * 1e6,
            spread=time.spread * 100,
            ratio=time.median / by_name[OWN].median if OWN in by_name else None,
            wrong=bad,
        )


def main() -> int:
    parser = command_line(__doc__, ("torch-gloo", OWN))
    add = parser.add_argument
    add("-b", dest="begin", type=byte_count, default=2**10, help="smallest size in bytes [1K]")
    add("-e", dest="end", type=byte_count, default=2**28, help="largest size [256M]")
    add("-f", dest="factor", type=float, default=4.0, help="factor between sizes [4]")
    add("-n", dest="iterations", type=int, default=0, help="iterations [20 to 400, by size]")
    args = parse(parser)
    if args.begin < TENSORS * 4 or args.factor <= 1:
        parser.error(f"-b must be at least {TENSORS * 4}, and -f greater than 1")
    torch.set_num_threads(1)
    with job(args) as (own, peers):
        hvd = own.hvd
        record = Record(
            "ddp",
            f"DistributedDataParallel, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [
                Plot("lines", "size", "time", "variant"),
                Plot("lines", "size", "ratio", "variant"),
            ],
            ranks=hvd.size(),
            options=options_of(args),
            peers=peers,
            speaks=hvd.rank() == 0,
        )
        for nbytes in sizes(args.begin, args.end, args.factor):
            measure(args, hvd, peers, nbytes, record)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
