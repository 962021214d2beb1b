"""Time of a training step in programs that do not only repeat one step.

    python benchmarks/loops.py -np 2

A step reduces many small tensors and waits for all of them. Loops:

undisturbed   the same step, again and again
metric        after every ten steps, one more tensor
evaluation    after every ten steps, five steps that reduce seven other tensors
shared        the same, and two of the seven tensors are also reduced by the training steps
alternating   two steps without common tensors, in turn
nearly alike  ten steps, then ten steps that differ by one tensor

The loops alternate in blocks. Each block starts horoplug anew, so that it knows nothing of the other loops, and a few
rounds are not timed. Only the training steps are timed. ``median`` is over all of them, and ``mean`` includes what
changing from one kind of step to another costs a training step. ``first`` is the median of the first training step
after other operations. ``ratio`` and ``mean ratio`` are relative to the undisturbed loop. ``messages`` are the
control messages of rank 0 per training step, without those of learning.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from harness.job import command_line, job, options_of, parse
from harness.record import Column, Plot, Record

ABOUT = """Steps that reduce many small tensors, in loops that also do other things: time of a training step, relative
to a loop that only repeats it."""

COLUMNS = {
    "loop": Column("loop", width=12),
    "steps": Column("n", width=6),
    "median": Column("median", "ms", ".3f"),
    "mean": Column("mean", "ms", ".3f"),
    "first": Column("first", "ms", ".3f"),
    "ratio": Column("ratio", "x", ".2f"),
    "mean_ratio": Column("mean ratio", "x", ".2f", 10),
    "messages": Column("messages", "", ".2f"),
    "wrong": Column("#wrong", width=6),
}

ELEMENTS = 64
WARM_UP = 3  # rounds of ten steps before a block is timed


class Step(NamedTuple):
    tensors: list[str]
    is_timed: bool = True


def rounds(count: int) -> dict[str, list[Step]]:
    """A round of each loop: about ten training steps, and what happens between them."""

    def names(kind: str, number: int = count) -> list[str]:
        return [f"{kind}.{i}" for i in range(number)]

    def training(loop: str) -> list[Step]:
        return [Step(names(f"{loop}.training"))] * 10

    def evaluation(loop: str, shared: int) -> list[Step]:
        tensors = names(f"{loop}.training")[:shared] + names(f"{loop}.evaluation", 7 - shared)
        return [Step(tensors, False)] * 5

    alike = names("alike")
    return {
        "undisturbed": training("undisturbed"),
        "metric": [*training("metric"), Step(["metric"], False)],
        "evaluation": [*training("evaluation"), *evaluation("evaluation", 0)],
        "shared": [*training("shared"), *evaluation("shared", 2)],
        "alternating": [Step(names("even")), Step(names("odd"))] * 5,
        "nearly alike": [Step([*alike[:-1], "one"])] * 10 + [Step([*alike[:-1], "other"])] * 10,
    }


class Loop:
    def __init__(self, hvd: Any, steps: list[Step]) -> None:
        self.hvd = hvd
        self.steps = steps
        names = {name for step in steps for name in step.tensors}
        self.arrays = {name: np.zeros(ELEMENTS, np.float32) for name in names}

    def run(self, step: Step) -> None:
        hvd = self.hvd
        handles = [
            hvd.allreduce_async_(self.arrays[name], op=hvd.Sum, name=name) for name in step.tensors
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def round(self) -> Iterator[tuple[float, bool]]:
        """Runs each step. Yields the seconds of each timed one, and whether it follows another kind of step."""
        previous = self.steps[-1]
        for step in self.steps:
            start = time.perf_counter()
            self.run(step)
            seconds = time.perf_counter() - start
            if step.is_timed:
                yield seconds, step is not previous
            previous = step

    def wrong_elements(self) -> int:
        wrong = 0
        for step in self.steps:
            for array in self.arrays.values():
                array.fill(1 + self.hvd.rank())
            self.run(step)
            right = self.hvd.size() * (self.hvd.size() + 1) / 2
            wrong += sum(int((self.arrays[name] != right).sum()) for name in step.tensors)
        for array in self.arrays.values():
            array.fill(0)
        return wrong


def messages() -> int:
    from horoplug.common.context import context

    return int(context.engine().stats()["control_messages"])


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--tensors", type=int, default=100, help="tensors of a training step [100]")
    add("--rounds", type=int, default=20, help="rounds of ten steps in a block [20]")
    add("--blocks", type=int, default=6, help="blocks, in which the loops alternate [6]")
    args = parse(parser)
    with job(args) as (own, _):
        hvd = own.hvd
        record = Record(
            "loops",
            f"loops, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [Plot("bars", "loop", "ratio", "loop")],
            ranks=hvd.size(),
            options=options_of(args),
            speaks=hvd.rank() == 0,
        )
        loops = {name: Loop(hvd, steps) for name, steps in rounds(args.tensors).items()}
        times: dict[str, list[tuple[float, bool]]] = {name: [] for name in loops}
        sent = dict.fromkeys(loops, 0)
        wrong = dict.fromkeys(loops, 0)
        for _ in range(args.blocks):
            for name, loop in loops.items():
                hvd.shutdown()
                hvd.init()
                for _ in range(WARM_UP):
                    list(loop.round())
                before = messages()
                for _ in range(args.rounds):
                    times[name] += loop.round()
                sent[name] += messages() - before
                wrong[name] += loop.wrong_elements()
        usual: dict[str, float] = {}
        for name, measured in times.items():
            seconds = np.array([time for time, _ in measured])
            slowest = hvd.allreduce(seconds, op=hvd.Max, name="loops.times")
            first = slowest[[is_first for _, is_first in measured]]
            figures = {"median": float(np.median(slowest)), "mean": float(slowest.mean())}
            usual = usual or figures
            record.row(
                loop=name,
                steps=len(slowest),
                median=figures["median"] * 1e3,
                mean=figures["mean"] * 1e3,
                first=float(np.median(first)) * 1e3 if len(first) else None,
                ratio=figures["median"] / usual["median"],
                mean_ratio=figures["mean"] / usual["mean"],
                messages=sent[name] / len(slowest),
                wrong=wrong[name],
            )
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
