"""The cost of the hooks of ``horoplug.torch.DistributedOptimizer`` for a model of many small parameters.

    python benchmarks/torch_hooks.py                (one rank, hooks forced)
    python benchmarks/torch_hooks.py -np 2          (starts the ranks itself)

All times are microseconds per parameter, medians over the iterations on rank 0:

hooks      the time of the hooks in the backward thread, including their work at the end of backward, without the cost
           of reading the clock. The goal is less than 3 µs.
backward   the time of the backward pass with the hooks minus that of the same model without hooks. Besides ``hooks``,
           this includes autograd's cost of calling a hook, and the time that the progress thread takes on a busy core.
finish     the time of ``optimizer.synchronize()`` when all reductions are done.

``--cpu`` measures processor time of the thread instead of elapsed time. This excludes the time of other programs and of
horoplug's progress thread, for a machine that is busy or has too few cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from harness.job import command_line, job, options_of, parse
from harness.record import Column, Record

ABOUT = """The cost of the hooks of horoplug's DistributedOptimizer for a model of many small parameters, per parameter,
median over the iterations on rank 0: in the hooks, in the backward pass, and in synchronize() when all reductions are
done."""

COLUMNS = {
    "parameters": Column("parameters", width=10),
    "elements": Column("elements", width=8),
    "hooks": Column("hooks", "µs", ".2f"),
    "backward": Column("backward", "µs", ".2f"),
    "finish": Column("finish", "µs", ".2f"),
}

clock = time.thread_time_ns if "--cpu" in sys.argv else time.perf_counter_ns


class Stopwatch:
    """Adds up the time spent in functions."""

    def __init__(self) -> None:
        self.total = 0
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = clock()
            try:
                return function(*args)
            finally:
                self.total += clock() - start
                self.calls += 1

        return timed

    def read(self) -> tuple[int, int]:
        """Nanoseconds and calls since the last call of this method."""
        seen, self.total, self.calls = (self.total, self.calls), 0, 0
        return seen


class TimedEngine:
    """Autograd's engine, with the functions that run at the end of backward under a stopwatch."""

    def __init__(self, engine: Any, watch: Stopwatch) -> None:
        self.engine = engine
        self.watch = watch

    def queue_callback(self, function: Callable[[], None]) -> None:
        self.engine.queue_callback(self.watch.around(function))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def idle_nanoseconds() -> float:
    """The time that a stopwatch measures for an empty function."""
    watch = Stopwatch()
    nothing = watch.around(lambda _: None)
    readings = []
    for _ in range(20):
        for _ in range(1000):
            nothing(None)
        readings.append(watch.read()[0] / 1000)
    return statistics.median(readings)


class Model(torch.nn.Module):
    """A model of many parameters with almost no computation."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.ones(elements) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def timed_backward(model: Model) -> int:
    loss = model()
    start = clock()
    loss.backward()
    return clock() - start


def measure(args: argparse.Namespace, hvd: Any) -> dict[str, float]:
    plain, model = (Model(args.parameters, args.elements) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"groups": args.groups} if args.groups else {}
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    watch, variable = Stopwatch(), cast(Any, torch.autograd.Variable)
    engine = variable._execution_engine
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    untimed = [dict(of_one) for of_one in hooks]
    idle = idle_nanoseconds()
    rows: dict[str, list[float]] = {"hooks": [], "backward": [], "finish": []}

    def step() -> int:
        """Wait until all gradients are reduced, then finish the step. Returns the nanoseconds of ``synchronize``."""
        while not all(hvd.poll(handle) for handle, _ in optimizer._handles.values()):
            pass
        start = clock()
        optimizer.synchronize()
        spent = clock() - start
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
        return spent

    for iteration in range(args.warm_up + args.iterations):
        hvd.barrier()
        timed_backward(plain)
        plain.zero_grad()
        without = timed_backward(plain)
        plain.zero_grad()
        with_hooks = timed_backward(model)
        finish = step()
        for of_one, original in zip(hooks, untimed, strict=True):
            of_one.update({key: watch.around(hook) for key, hook in original.items()})
        variable._execution_engine = TimedEngine(engine, watch)
        timed_backward(model)
        variable._execution_engine = engine
        for of_one, original in zip(hooks, untimed, strict=True):
            of_one.update(original)
        spent, calls = watch.read()
        step()
        if iteration >= args.warm_up:
            rows["hooks"].append(spent - idle * calls)
            rows["backward"].append(with_hooks - without)
            rows["finish"].append(finish)
    return {name: statistics.median(ns) / 1e3 / args.parameters for name, ns in rows.items()}


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--parameters", type=int, default=1000, help="number of parameters [1000]")
    add("--elements", type=int, default=64, help="float32 elements in each of them [64]")
    add("--groups", type=int, default=0, help="number of groups of gradients [no groups]")
    add("--iterations", type=int, default=50, help="number of iterations [50]")
    add("--warm-up", type=int, default=5, help="iterations that are not counted [5]")
    add("--cpu", action="store_true", help="measure processor time of the thread")
    args = parse(parser)
    os.environ["HOROVOD_ELASTIC"] = "1"  # hooks even where there is no other rank
    torch.set_num_threads(1)
    with job(args) as (own, _):
        import horoplug.torch as hvd

        record = Record(
            "torch_hooks",
            f"gradient hooks, {hvd.size()} rank(s)",
            ABOUT,
            COLUMNS,
            [],
            ranks=own.hvd.size(),
            options=options_of(args),
            speaks=own.hvd.rank() == 0,
        )
        result = measure(args, hvd)
        record.row(parameters=args.parameters, elements=args.elements, **result)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
