"""Time of small operations called from Python, directly in C and through Python, by turns.

    python benchmarks/calls.py -np 1

Calls of one rank alone cost what Python and the engine cost; -np 2 adds what the ranks exchange. Kinds of calls:

blocking   allreduce_ of 1 element
started    allreduce_async_ of 1 element, and synchronize
many       allreduce_async_ of 200 arrays of 1 KiB, and synchronize of each: time of one
wrapper    torch.distributed's function on a group that does nothing: what the blocking call there costs at least

c10d stands for torch.distributed on the backend horoplug, with all_reduce in place of these functions.

Both ways alternate in blocks, each of which starts horoplug anew (HOROPLUG_DIRECT_CALLS; docs/design/bindings.md).
``direct`` and ``python`` are the medians over the blocks of the median call, on the slowest rank. ``ratio`` is the
median of the ratios of neighbouring blocks, python to direct, and ``spread`` their interquartile range. ``calls``: the
direct time in calls of an empty function of Python.
"""

from __future__ import annotations

import os
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from harness.by_turns import Ratios
from harness.job import command_line, job, open_peer, options_of, parse
from harness.record import Column, Plot, Record

ABOUT = """Small operations called from Python, directly in C and through Python."""

COLUMNS = {
    "framework": Column("framework", width=9),
    "call": Column("call", width=9),
    "direct": Column("direct", "µs", ".2f"),
    "python": Column("python", "µs", ".2f"),
    "ratio": Column("ratio", "x", ".2f"),
    "spread": Column("spread", "x", ".2f"),
    "calls": Column("calls", "", ".0f"),
    "wrong": Column("#wrong", width=6),
}
MANY = 200


Calls = dict[str, tuple[Callable[[], None], int]]
"""Each kind of call, with its number of operations."""


class Framework(NamedTuple):
    calls: Callable[[], Calls]
    """Makes the calls anew, once horoplug has been started."""
    checked: Callable[[], Any]
    """The sum of ones over the ranks."""


def frameworks(hvd: Any) -> dict[str, Framework]:
    found = {"NumPy": of_functions(hvd, lambda count: np.ones(count, np.float32))}
    try:
        import torch

        import horoplug.torch as of_torch
    except ImportError:
        return found
    open_peer("torch-horoplug", hvd)
    return found | {"PyTorch": of_functions(of_torch, torch.ones), "c10d": of_groups(torch)}


def of_functions(hvd: Any, make: Callable[[int], Any]) -> Framework:
    one, several = make(1), [(make(256), f"calls.{i}") for i in range(MANY)]
    low = hvd.Min  # leaves ones as they are

    def blocking() -> None:
        hvd.allreduce_(one, op=low, name="calls.one")

    def started() -> None:
        hvd.synchronize(hvd.allreduce_async_(one, op=low, name="calls.one"))

    def many() -> None:
        for handle in [hvd.allreduce_async_(x, op=low, name=name) for x, name in several]:
            hvd.synchronize(handle)

    calls: Calls = {"blocking": (blocking, 1), "started": (started, 1), "many": (many, MANY)}
    return Framework(
        lambda: calls, lambda: hvd.allreduce_(make(3), op=hvd.Sum, name="calls.checked")
    )


def of_groups(torch: Any) -> Framework:
    dist: Any = torch.distributed
    group_class: Any = dist.ProcessGroup
    low = dist.ReduceOp.MIN
    one, several = torch.ones(1), [torch.ones(256) for _ in range(MANY)]

    class Nothing(group_class):  # type: ignore[misc]
        def allreduce(self, tensors: Any, opts: Any = None) -> None:
            pass

    nothing = Nothing(dist.get_rank(), dist.get_world_size())

    def calls() -> Calls:
        group = dist.new_group(backend="horoplug")  # reads the variable when it begins

        def blocking() -> None:
            dist.all_reduce(one, low, group)

        def started() -> None:
            dist.all_reduce(one, low, group, async_op=True).wait()

        def many() -> None:
            for work in [dist.all_reduce(x, low, group, async_op=True) for x in several]:
                work.wait()

        def wrapper() -> None:
            dist.all_reduce(one, low, nothing)

        kinds: Calls = {"blocking": (blocking, 1), "started": (started, 1), "many": (many, MANY)}
        return kinds | {"wrapper": (wrapper, 1)}

    def checked() -> Any:
        x = torch.ones(3)
        dist.all_reduce(x)
        return x

    return Framework(calls, checked)


def microseconds(call: Callable[[], None], operations: int, repeats: int) -> float:
    """Of one operation: the median."""
    times = timeit.repeat(call, number=1, repeat=max(2, repeats // operations))
    return statistics.median(times) / operations * 1e6


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--blocks", type=int, default=11, help="blocks of each way [11]")
    parser.add_argument("--repeats", type=int, default=4000, help="operations in a block [4000]")
    args = parse(parser)
    with job(args) as (own, _):
        hvd = own.hvd
        record = Record(
            "calls",
            f"small operations from Python, {hvd.size()} ranks",
            ABOUT,
            COLUMNS,
            [Plot("bars", "call", "calls", "framework")],
            ranks=hvd.size(),
            options=options_of(args),
            speaks=hvd.rank() == 0,
        )
        known = frameworks(hvd)
        times: dict[tuple[str, str], dict[str, list[float]]] = {}
        for block in range(args.blocks):
            for way in ("01", "10")[block % 2]:
                hvd.shutdown()
                os.environ["HOROPLUG_DIRECT_CALLS"] = way
                hvd.init()
                for framework, of in known.items():
                    for name, (call, operations) in of.calls().items():
                        microseconds(call, operations, args.repeats // 4)  # until it is a plan
                        mine = microseconds(call, operations, args.repeats)
                        slowest = hvd.allreduce(np.array([mine]), op=hvd.Max, name="calls.time")
                        found = times.setdefault((framework, name), {"0": [], "1": []})
                        found[way].append(float(slowest[0]))
        empty = min(timeit.repeat(lambda: None, number=10_000, repeat=5)) / 10_000 * 1e6
        for (framework, name), found in times.items():
            ratios = Ratios.of([a / b for a, b in zip(found["0"], found["1"], strict=True)])
            direct = statistics.median(found["1"])
            x = known[framework].checked()
            record.row(
                framework=framework,
                call=name,
                direct=direct,
                python=statistics.median(found["0"]),
                ratio=ratios.median,
                spread=ratios.spread,
                calls=direct / empty,
                wrong=sum(value != hvd.size() for value in x.tolist()),
            )
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
