"""Time to average all gradients of a model once: the communication of a training step, without the training.

    python benchmarks/gradients.py -np 2 --peer torch-gloo --peer mpi4py
    python benchmarks/gradients.py -np 2 --model 200x1KiB --model bert-large
    python benchmarks/gradients.py -np 2 --compression fp16

All gradients exist from the start. Each is submitted separately, in the order of the backward pass, and then the step
waits for all of them. The time includes the averaging, except for the variant called bare. Variants:

horoplug              ``DistributedOptimizer.synchronize()``, which submits all gradients, as in training
horoplug, views       the same with gradient_as_bucket_view=True, with the gradients already in the buckets
horoplug, cast before with --compression: the same with a user-defined compressor, which casts with PyTorch before and
                      after the reduction; with the predefined compressors the core casts while it copies
horoplug, one by one  ``allreduce_async_`` for each gradient, then ``synchronize`` for each; never compressed
horoplug, grouped     ``grouped_allreduce_`` of all gradients; never compressed
torch-gloo            ``all_reduce(async_op=True)`` for each gradient, then wait and divide
torch-horoplug        the same through ``torch.distributed``'s backend horoplug; also with buckets
torch-gloo, buckets   the buckets of DistributedDataParallel: gradients are divided while they are copied into flat
                      buckets of 25 MiB (the first of 1 MiB), which are reduced asynchronously and copied back
mpi4py, bare          ``Allreduce`` in place for each gradient: a sum, without averaging
mpi4py                the same, followed by a division
mpi4py, Iallreduce    ``Iallreduce`` for each gradient, then wait and divide
horovod               like horoplug, one by one

``ratio`` is the median over that of the first variant; ``rate`` is the gradients' size over the median.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from harness.clock import Summary, alternate
from harness.job import command_line, job, options_of, parse
from harness.models import elements, gradients
from harness.peers import PEERS, Peer
from harness.record import Column, Plot, Record

from horoplug.bench.cases import Run

ABOUT = """All gradients of a model, float32, are submitted one by one in the order of the backward pass; then the step
waits for all of them. Time per step, including the averaging, except for variants called bare."""

COLUMNS = {
    "model": Column("model", width=12),
    "tensors": Column("tensors", width=7),
    "bytes": Column("size", "B", width=11),
    "variant": Column("variant", width=22),
    "iterations": Column("n", width=4),
    "time": Column("time", "ms", ".3f", 10),
    "p99": Column("p99", "ms", ".3f", 10),
    "spread": Column("spread", "%", ".0f", 6),
    "rate": Column("rate", "GB/s", ".3f", 7),
    "ratio": Column("ratio", "x", ".2f", 7),
    "wrong": Column("#wrong", width=6),
}

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # DistributedDataParallel's

Tensors = list[torch.Tensor]


class Variant(NamedTuple):
    name: str
    step: Run
    sums: bool  # the results are sums instead of averages
    tensors: Tensors | None = (
        None  # the variant's own tensors; None: the tensors that the variants share
    )


Variants = Iterator[Variant]


# ---- one function for each library: steps on the same tensors --------------------------------------------------------


def horoplug_steps(_: Peer, tensors: Tensors, compression: str) -> Variants:
    import horoplug.torch as hvd

    compressor: Any = getattr(hvd.Compression, compression)

    def optimizer(
        parameters: list[Any], named: list[tuple[str, Any]], views: bool, by: Any = compressor
    ) -> Any:
        """An optimizer whose hooks never run, because there is no backward pass: ``synchronize`` is a step."""
        plain = torch.optim.SGD(parameters, lr=0.0)
        return hvd.DistributedOptimizer(plain, named, by, gradient_as_bucket_view=views)

    def of_all(name: str, by: Any = compressor) -> Run:
        parameters = [torch.nn.Parameter(torch.empty_like(tensor)) for tensor in tensors]
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.grad = tensor
        named = [(f"{name}.{number}", p) for number, p in enumerate(parameters)]
        step: Run = optimizer(parameters, named, False, by).synchronize
        return step

    yield Variant("horoplug", of_all("gradient"), False)
    if compression != "none":
        # The core does not replace the casts of a derived class, which may do anything.
        yield Variant(
            "horoplug, cast before", of_all("cast", type("Own", (compressor,), {})), False
        )

    parameters = [torch.nn.Parameter(torch.empty_like(tensor)) for tensor in tensors]
    # Buckets are filled in the reverse order of the names, because backward runs in the reverse order of forward.
    named = [(f"view.{number}", p) for number, p in enumerate(parameters)][::-1]
    in_buckets = optimizer(parameters, named, True)
    in_buckets.synchronize()  # sets the gradients to zero
    views = [p.grad for p in parameters if p.grad is not None]
    yield Variant("horoplug, views", in_buckets.synchronize, False, views)

    yield Variant("horoplug, one by one", one_by_one(hvd, tensors), False)

    given = [*tensors]

    def grouped() -> None:
        hvd.grouped_allreduce_(given, op=hvd.Average, name=f"grouped.{len(given)}")

    yield Variant("horoplug, grouped", grouped, False)


def one_by_one(hvd: Any, tensors: Tensors) -> Run:
    """For horoplug and Horovod, whose API is the same."""
    names = [f"one.{len(tensors)}.{number}" for number in range(len(tensors))]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(tensor, op=hvd.Average, name=name)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return step


def torch_steps(peer: Any, tensors: Tensors) -> Variants:
    dist, size, group = peer.dist, peer.size, peer.group

    def each() -> None:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            tensor.div_(size)

    buckets = [
        (torch.empty(sum(t.numel() for t in members)), members) for members in bucketed(tensors)
    ]
    divided = [
        (flat, members, flat.split([t.numel() for t in members])) for flat, members in buckets
    ]

    def in_buckets() -> None:
        works = []
        for flat, members, views in divided:
            for tensor, view in zip(members, views, strict=True):
                torch.mul(tensor.view(-1), 1 / size, out=view)
            works.append(dist.all_reduce(flat, group=group, async_op=True))
        for work, (_, members, views) in zip(works, divided, strict=True):
            work.wait()
            for tensor, view in zip(members, views, strict=True):
                tensor.view(-1).copy_(view)

    yield Variant(peer.name, each, False)
    yield Variant(f"{peer.name}, buckets", in_buckets, False)


def bucketed(tensors: Tensors) -> list[Tensors]:
    buckets: list[Tensors] = [[]]
    room = FIRST_BUCKET
    for tensor in tensors:
        buckets[-1].append(tensor)
        room -= tensor.numel() * 4
        if room <= 0:
            buckets.append([])
            room = BUCKET
    return [bucket for bucket in buckets if bucket]


def mpi4py_steps(peer: Any, tensors: Tensors) -> Variants:
    comm, MPI, size = peer.comm, peer.MPI, peer.size
    arrays = [tensor.numpy() for tensor in tensors]

    def bare() -> None:
        for array in arrays:
            comm.Allreduce(MPI.IN_PLACE, array)

    def average() -> None:
        for array, tensor in zip(arrays, tensors, strict=True):
            comm.Allreduce(MPI.IN_PLACE, array)
            tensor.div_(size)

    def asynchronous() -> None:
        requests = [comm.Iallreduce(MPI.IN_PLACE, array) for array in arrays]
        MPI.Request.Waitall(requests)
        for tensor in tensors:
            tensor.div_(size)

    yield Variant(f"{peer.name}, bare", bare, True)
    yield Variant(peer.name, average, False)
    yield Variant(f"{peer.name}, Iallreduce", asynchronous, False)


def horovod_steps(peer: Any, tensors: Tensors) -> Variants:
    yield Variant(peer.name, one_by_one(peer.theirs, tensors), False)


Steps = Callable[[Any, Tensors], Variants]

PEERS_STEPS: dict[str, Steps] = {
    "torch-gloo": torch_steps,
    "torch-horoplug": torch_steps,
    "mpi4py": mpi4py_steps,
    "horovod": horovod_steps,
}


# ---- the check and the clock -----------------------------------------------------------------------------------------


def wrong_elements(hvd: Any, tensors: Tensors, step: Run, sums: bool) -> int:
    """The number of wrong elements after one step, summed over all ranks."""
    ranks = hvd.size()
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 7 + hvd.rank())
        tensor.view(-1)[-1] = -1.0 - hvd.rank()
    step()
    factor = ranks if sums else 1
    mean = (ranks - 1) / 2
    wrong = 0
    for number, tensor in enumerate(tensors):
        right = torch.full((tensor.numel(),), (number % 7 + mean) * factor)
        right[-1] = (-1.0 - mean) * factor
        wrong += int((tensor.view(-1) != right).sum())
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])


def measure(args: Any, hvd: Any, libraries: list[Peer], model: str, record: Record) -> None:
    shapes = gradients(model)
    size = elements(shapes) * 4
    # All variants except one use the same memory.
    tensors = [torch.zeros(shape) for shape in shapes]
    steps: dict[str, Steps] = {
        **PEERS_STEPS,
        "horoplug": partial(horoplug_steps, compression=args.compression),
    }
    variants = [
        variant
        for library in libraries
        for variant in steps[library.name.partition(":")[0]](library, tensors)
    ]
    wrong = [wrong_elements(hvd, v.tensors or tensors, v.step, v.sums) for v in variants]
    for variant in variants:
        for tensor in variant.tensors or tensors:
            tensor.zero_()
    iterations = args.iterations or min(200, max(5, 2**32 // (size + 2**23)))
    times = alternate(hvd, [variant.step for variant in variants], iterations)
    first = Summary.of(times[0]).median
    for variant, seconds, bad in zip(variants, times, wrong, strict=True):
        summary = Summary.of(seconds)
        record.row(
            model=model,
            tensors=len(shapes),
            bytes=size,
            variant=variant.name,
            iterations=len(seconds),
            time=summary.median * 1e3,
            p99=summary.p99 * 1e3,
            spread=summary.spread * 100,
            rate=size / summary.median / 1e9,
            ratio=summary.median / first,
            wrong=bad,
        )


def main() -> int:
    parser = command_line(__doc__, tuple(PEERS))
    add = parser.add_argument
    add("--model", action="append", help="resnet50, bert-large, or like 200x1KiB [resnet50]")
    add(
        "--compression",
        choices=("none", "fp16", "bf16"),
        default="none",
        help="compression of horoplug's gradients [none]",
    )
    add("-n", dest="iterations", type=int, default=0, help="iterations [5 to 200, by size]")
    args = parse(parser)
    models = args.model or ["resnet50"]
    torch.set_num_threads(1)
    with job(args) as (own, peers):
        hvd = own.hvd
        record = Record(
            "gradients",
            f"gradients, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [Plot("bars", "model", "time", "variant"), Plot("bars", "model", "ratio", "variant")],
            ranks=hvd.size(),
            options=options_of(args),
            peers=peers,
            speaks=hvd.rank() == 0,
        )
        for model in models:
            measure(args, hvd, [own, *peers], model, record)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
