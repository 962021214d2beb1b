"""What the hooks of ``horoplug.torch.DistributedOptimizer`` cost a model of many small parameters.

    python benchmarks/torch_hooks.py                (one rank, hooks forced)
    python benchmarks/torch_hooks.py -np 2          (starts the ranks itself)

All times are microseconds per parameter, medians over the iterations on rank 0:

hooks      what runs in the backward thread for horoplug: the hooks, and what they have put off to the end of backward;
           the clock's own cost is taken off. It is to stay below 3 µs.
backward   the backward pass with the hooks, less that of the same model without them. It has, besides ``hooks``,
           what autograd needs to call a hook, and whatever the progress thread takes from a busy core.
finish     ``optimizer.synchronize()`` when every reduction is done already.

With ``--cpu`` they are times of the thread on a processor, without what other programs, and horoplug's own progress
thread, have taken from it: for a machine that is busy, or has too few cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

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
        """Nanoseconds and calls since the last time."""
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
    """What a stopwatch shows for a function that does nothing."""
    watch = Stopwatch()
    nothing = watch.around(lambda _: None)
    readings = []
    for _ in range(20):
        for _ in range(1000):
            nothing(None)
        readings.append(watch.read()[0] / 1000)
    return statistics.median(readings)


class Model(torch.nn.Module):
    """Many parameters with next to no computation."""

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
        """Nanoseconds of the end of a step once everything is reduced."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-np", type=int, default=0, help="start this many ranks on this machine")
    add("--parameters", type=int, default=1000, help="how many there are [1000]")
    add("--elements", type=int, default=64, help="float32 elements in each of them [64]")
    add("--groups", type=int, default=0, help="reduce them in so many groups [each by itself]")
    add("--iterations", type=int, default=50, help="[50]")
    add("--warm-up", type=int, default=5, help="iterations that are not counted [5]")
    add("--cpu", action="store_true", help="processor time of the thread")
    add("--json", metavar="FILE", help="write the result there as well")
    args = parser.parse_args()
    if args.np:
        launch = "import sys; from horoplug.runner.launch import main; sys.exit(main())"
        script = [sys.executable, str(Path(__file__).resolve()), *_without_np(sys.argv[1:])]
        os.execv(sys.executable, [sys.executable, "-c", launch, "-np", str(args.np), *script])

    os.environ["HOROVOD_ELASTIC"] = "1"  # hooks even where there is no other rank
    import horoplug.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    result = measure(args, hvd)
    if hvd.rank() == 0:
        print(f"# {args.parameters} parameters of {args.elements}, {hvd.size()} rank(s); µs each")
        print(" ".join(f"{name:>9}" for name in result))
        print(" ".join(f"{value:>9.2f}" for value in result.values()), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps({"ranks": hvd.size(), **result}))
    hvd.shutdown()


def _without_np(words: list[str]) -> list[str]:
    at = next(i for i, word in enumerate(words) if word.startswith("-np"))
    return words[:at] + words[at + (2 if words[at] == "-np" else 1) :]


if __name__ == "__main__":
    main()
