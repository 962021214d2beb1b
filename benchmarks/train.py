"""Speed of data-parallel training, compared with the speed of one process times the number of ranks.

    python benchmarks/train.py -np 2 --peer torch-gloo
    python benchmarks/train.py -np 2 --model cnn --peer torch-gloo

All variants have the same model, initial parameters and data, and one thread per rank; blocks of steps of the variants
alternate within one run. ``efficiency`` is the samples per second of all ranks over the number of ranks times the
samples per second of ``alone``. With one rank per core, it shows the cost of communication and of sharing memory and
caches. Variants:

alone            no communication; rank 0 trains while the other ranks sleep
apart            no communication; every rank trains: the upper limit for any reduction on this machine
apart, DDP       ``DistributedDataParallel`` with a hook that sends nothing: the upper limit for its backends. Measured
                 if a peer is one of them
horoplug         ``DistributedOptimizer``
horoplug, views  ``DistributedOptimizer(gradient_as_bucket_view=True)``
torch-gloo       ``DistributedDataParallel(gradient_as_bucket_view=True, broadcast_buffers=False)``
torch-horoplug   the same with ``torch.distributed``'s backend horoplug
horovod          Horovod's ``DistributedOptimizer``

With ``--compile``, each variant but ``alone`` and ``apart, DDP`` has a second one, ``…, compiled``: the same step in
one function that ``torch.compile`` has compiled (with Inductor, which needs a C++ compiler).

The C library gives memory back to the kernel when much of it is free, such as all gradients after ``zero_grad``.
Whether it does depends on where other objects happen to lie, and costs up to a quarter of a step of the MLP, in any
variant. So the ranks run with MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ so large that it never does.

Models: ``mlp``, 10.5 M parameters on batches of 64; ``cnn``, batch-normalised, on batches of 32 images of 32x32. The
check: after one step, all parameters equal those of a step with the mean of the ranks' gradients.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from harness.clock import Summary, alternate
from harness.job import command_line, job, options_of, parse
from harness.peers import Peer
from harness.record import Column, Plot, Record
from torch import nn

ABOUT = """Steps of training (forward, backward, reduction, SGD with momentum) with one thread per rank on synthetic
data, beside one process alone. Efficiency is the samples per second of all ranks over the number of ranks times those
of the process alone. MLP: 10.5 M parameters, batches of 64. CNN: batch-normalised, batches of 32 images of 32x32."""

COLUMNS = {
    "model": Column("model", width=6),
    "variant": Column("variant", width=25),
    "batch": Column("batch", width=5),
    "steps": Column("steps", width=5),
    "time": Column("step", "ms", ".2f", 9),
    "p99": Column("p99", "ms", ".2f", 9),
    "spread": Column("spread", "%", ".0f", 6),
    "rate": Column("samples/s", form=".0f", width=9),
    "efficiency": Column("efficiency", "%", ".1f", 10),
    "wrong": Column("#wrong", width=6),
}

BATCHES = 8  # different ones, used in turn
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31), "MALLOC_MMAP_THRESHOLD_": str(2**31)}
COMPILED = ", compiled"


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]  # of one sample


def mlp() -> nn.Module:
    sizes = (1024, 2048, 2048, 2048)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (3, 32, 1),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
        (64, 128, 2),
    ):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


TASKS = {"mlp": Task(mlp, 64, (1024,)), "cnn": Task(cnn, 32, (3, 32, 32))}


class Trainer:
    """Trains a copy of the model; this base class reduces no gradients."""

    def __init__(self, name: str, model: nn.Module, data: list[tuple[torch.Tensor, Any]]) -> None:
        self.name = name
        self.model = model  # what forward is called on
        self.parameters = list(model.parameters())
        self.optimizer: Any = torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9)
        self.data = data
        self.steps = 0

        self.train: Callable[[torch.Tensor, Any], None] = self.train_eagerly

    def batch(self) -> tuple[torch.Tensor, Any]:
        return self.data[self.steps % BATCHES]

    def backward(self, images: torch.Tensor, labels: Any) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()

    def train_eagerly(self, images: torch.Tensor, labels: Any) -> None:
        self.backward(images, labels)
        self.optimizer.step()

    def step(self) -> None:
        self.train(*self.batch())
        self.steps += 1

    def compiled(self) -> Trainer:
        self.name += COMPILED
        self.train = torch.compile(self.train_eagerly)
        return self


def optimizer_of(library: Any, trainer: Trainer, **options: Any) -> None:
    """For horoplug and Horovod, whose API is the same."""
    named = trainer.model.named_parameters()
    trainer.optimizer = library.DistributedOptimizer(trainer.optimizer, named, **options)


def with_horoplug(_: Any, trainer: Trainer) -> None:
    import horoplug.torch as hvd

    optimizer_of(hvd, trainer)


def with_views(_: Any, trainer: Trainer) -> None:
    import horoplug.torch as hvd

    optimizer_of(hvd, trainer, gradient_as_bucket_view=True)


def with_ddp(peer: Any, trainer: Trainer) -> None:
    with warnings.catch_warnings():  # newer versions have another name for broadcast_buffers
        warnings.simplefilter("ignore", FutureWarning)
        trainer.model = nn.parallel.DistributedDataParallel(
            trainer.model,
            process_group=peer.group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )


def keep_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def apart_in_ddp(peer: Any, trainer: Trainer) -> None:
    with_ddp(peer, trainer)
    trainer.model.register_comm_hook(None, keep_bucket)  # type: ignore[operator]


def with_horovod(peer: Any, trainer: Trainer) -> None:
    optimizer_of(peer.theirs, trainer)


DISTRIBUTE: dict[str, dict[str, Callable[[Any, Trainer], None]]] = {
    "horoplug": {"": with_horoplug, ", views": with_views},
    "torch-gloo": {"": with_ddp},
    "torch-horoplug": {"": with_ddp},
    "horovod": {"": with_horovod},
}
"""By library, and by what is added to its name."""


def make_data(task: Task, rank: int) -> list[tuple[torch.Tensor, Any]]:
    """The rank's own batches, the same in every run."""
    random = torch.Generator().manual_seed(1000 + rank)
    return [
        (
            torch.randn(task.batch, *task.shape, generator=random),
            torch.randint(10, (task.batch,), generator=random),
        )
        for _ in range(BATCHES)
    ]


def trainers_of(libraries: list[Peer], task: Task, rank: int, compiles: bool) -> Iterator[Trainer]:
    """A trainer for each variant of each library, and one that compiles its step if ``compiles`` is set. All have the
    same initial parameters."""
    torch.manual_seed(1)
    start, data = task.model(), make_data(task, rank)
    for library in libraries:
        for more, distribute in DISTRIBUTE[library.name.partition(":")[0]].items():
            for is_compiled in (False, True) if compiles else (False,):
                trainer = Trainer(library.name + more, copy.deepcopy(start), data)
                distribute(library, trainer)
                yield trainer.compiled() if is_compiled else trainer


def wrong_parameters(hvd: Any, alone: Trainer, trainers: list[Trainer]) -> list[int]:
    """For each trainer, the number of wrong elements of its parameters after its first step, summed over all ranks.
    ``alone`` takes the same step with the mean of all ranks' gradients, which gives the correct values."""
    alone.backward(*alone.batch())
    for number, parameter in enumerate(alone.parameters):
        grad = parameter.grad
        assert grad is not None
        every = hvd.allgather(grad.numpy().reshape(1, -1), name=f"check.gradient.{number}")
        parameter.grad = torch.from_numpy(every.mean(axis=0)).view_as(parameter)
    alone.optimizer.step()
    alone.steps += 1
    counts = []
    for trainer in trainers:
        trainer.step()
        wrong = sum(
            int((~torch.isclose(is_, should, rtol=1e-4, atol=1e-6)).sum())
            for is_, should in zip(trainer.parameters, alone.parameters, strict=True)
        )
        total = hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check.wrong")
        counts.append(int(total[0]))
    return counts


def measure(args: Any, hvd: Any, libraries: list[Peer], model: str, record: Record) -> None:
    task, ranks = TASKS[model], hvd.size()
    torch.manual_seed(1)
    alone, apart = (
        Trainer(name, task.model(), make_data(task, hvd.rank())) for name in ("alone", "apart")
    )
    limits = [apart]  # without communication
    if with_groups := [library for library in libraries if library.name.startswith("torch-")]:
        limits.append(Trainer("apart, DDP", task.model(), make_data(task, hvd.rank())))
        apart_in_ddp(with_groups[0], limits[-1])
    if args.compile:
        torch.compiler.reset()  # it compiles a function anew for no more than 8 trainers
        limits.append(Trainer("apart", task.model(), make_data(task, hvd.rank())).compiled())
    trainers = list(trainers_of(libraries, task, hvd.rank(), args.compile))
    wrong = [0, *(0 for _ in limits), *wrong_parameters(hvd, alone, trainers)]
    # The other ranks continue to the next barrier, where they sleep.
    steps_alone = alone.step if hvd.rank() == 0 else lambda: None
    runs = [steps_alone, *(each.step for each in (*limits, *trainers))]
    times = alternate(hvd, runs, args.steps, args.blocks)
    rate_alone = task.batch / Summary.of(times[0]).median
    for trainer, seconds, bad in zip([alone, *limits, *trainers], times, wrong, strict=True):
        summary = Summary.of(seconds)
        processes = 1 if trainer is alone else ranks
        rate = processes * task.batch / summary.median
        record.row(
            model=model,
            variant=trainer.name,
            batch=task.batch,
            steps=len(seconds),
            time=summary.median * 1e3,
            p99=summary.p99 * 1e3,
            spread=summary.spread * 100,
            rate=rate,
            efficiency=rate / (processes * rate_alone) * 100,
            wrong=bad,
        )
    parameters = sum(p.numel() for p in alone.parameters)
    record.note(f"{model} has {parameters / 1e6:.2f} M parameters")


def main() -> int:
    parser = command_line(__doc__, ("torch-gloo", "torch-horoplug", "horovod"))
    add = parser.add_argument
    add("--model", action="append", choices=TASKS, help="may be repeated [all]")
    add("--steps", type=int, default=60, help="steps of each variant [60]")
    add("--blocks", type=int, default=6, help="blocks of steps that alternate between variants [6]")
    add("--compile", action="store_true", help="also with steps that torch.compile has compiled")
    os.environ.update(KEEP_MEMORY)  # of the ranks that parse() starts
    args = parse(parser)
    models = args.model or list(TASKS)
    torch.set_num_threads(1)
    with job(args) as (own, peers):
        hvd = own.hvd
        kind = "training with torch.compile" if args.compile else "training"
        record = Record(
            "train",
            f"{kind}, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [Plot("bars", "model", "efficiency", "variant")],
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
