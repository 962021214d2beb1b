"""``python -m horoplug.bench``, also ``horoplug bench``: the speed of the collectives by message size, like nccl-tests.

    horoplug bench -np 2                            two ranks on this machine
    horovodrun -np 8 -H a:4,b:4 horoplug bench      the ranks of a job, however it is started
    mpirun -np 4 python -m horoplug.bench --collective allgather --dtype float16

Each row is one size. An operation is called from Python, again and again, on NumPy arrays of zeros, in place if it has
that variant; before, its result is checked for other values. ``time`` is the median over the calls, and ``p99`` their
99th percentile; a call takes as long as on its slowest rank. ``algbw`` is size over time. ``busbw`` is the least number
of bytes that each rank must send or receive, over time (nccl-tests, doc/PERFORMANCE.md), in 10^9 bytes per second.
``sendrecv`` is a round trip between pairs of ranks, and ``barrier`` has no data. The exit status is 1 if a result was
wrong."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horoplug.bench.cases import (
    COLLECTIVES,
    OPS,
    Case,
    byte_count,
    cases,
    find_dtype,
    iterations_of,
    prepare,
    sizes,
    wrong_elements,
)

COLUMNS = {
    "size": ("B", 11, "d"),
    "count": ("elements", 11, "d"),
    "n": ("", 5, "d"),
    "time": ("µs", 11, ".2f"),
    "p99": ("µs", 11, ".2f"),
    "algbw": ("GB/s", 8, ".3f"),
    "busbw": ("GB/s", 8, ".3f"),
    "wrong": ("", 6, "d"),
}
"""Unit, width and format of each column of the table."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horoplug bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-np", type=int, default=0, metavar="N", help="start N ranks on this machine")
    add("-b", dest="begin", type=byte_count, default=8, metavar="SIZE", help="smallest size [8]")
    add("-e", dest="end", type=byte_count, default=2**26, metavar="SIZE", help="largest [64M]")
    add("-f", dest="factor", type=float, default=2.0, help="factor between sizes [2]")
    add("-n", dest="iterations", type=int, default=0, help="calls [20 to 1000, by size]")
    add("--collective", choices=COLLECTIVES, default="allreduce")
    add("--op", choices=OPS, default="sum", help="of a reduction [sum]")
    add("--dtype", default="float32", help="NumPy's name of a type, or bfloat16 [float32]")
    add("--json", metavar="FILE", help="also write the rows to this file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. ``arguments``: without the program's name."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    args = parser.parse_args(words)
    if args.begin < 1 or args.factor <= 1:
        parser.error("-b must be at least 1, and -f greater than 1")
    if args.collective == "reducescatter" and args.op not in ("sum", "avg"):
        parser.error("reducescatter supports --op sum and avg only")
    try:
        dtype = find_dtype(args.dtype)
    except (TypeError, ImportError) as error:
        parser.error(f"--dtype {args.dtype}: {error}")
    if args.np:
        from horoplug.runner.launch import main as launch

        rank = [sys.executable, "-m", "horoplug.bench", *_without_np(words)]
        return launch(["-np", str(args.np), "--no-status", *rank])
    return _run(args, dtype)


def measure(hvd: Any, case: Case, iterations: int) -> tuple[np.ndarray, int]:
    """Seconds of each call on its slowest rank, and the number of wrong elements on all ranks."""
    prepared = prepare(hvd, case)
    wrong = wrong_elements(hvd, case, prepared)
    for _ in range(max(2, iterations // 20)):
        prepared.run()
    hvd.barrier()
    seconds = np.empty(iterations)
    for i in range(iterations):
        begin = time.perf_counter()
        prepared.run()
        seconds[i] = time.perf_counter() - begin
    return hvd.allreduce(seconds, op=hvd.Max, name="bench.seconds"), wrong


def _rows(hvd: Any, args: argparse.Namespace, dtype: np.dtype[Any]) -> Iterator[dict[str, Any]]:
    bus_factor = COLLECTIVES[args.collective].bus_factor(hvd.size())
    wanted = sizes(args.begin, args.end, args.factor)
    for size, case in cases(args.collective, dtype, args.op, wanted, hvd.size()):
        seconds, wrong = measure(hvd, case, args.iterations or iterations_of(size))
        median, p99 = np.quantile(seconds, [0.5, 0.99])
        yield {
            "size": size,
            "count": case.count,
            "n": len(seconds),
            "time": float(median) * 1e6,
            "p99": float(p99) * 1e6,
            "algbw": size / float(median) / 1e9,
            "busbw": size / float(median) / 1e9 * bus_factor,
            "wrong": wrong,
        }


def _run(args: argparse.Namespace, dtype: np.dtype[Any]) -> int:
    import horoplug as hvd

    hvd.init()
    speaks = hvd.rank() == 0
    what = (
        f"{args.collective} ({args.op})"
        if COLLECTIVES[args.collective].reduces
        else args.collective
    )
    title = f"{what}, {args.dtype}, {hvd.size()} ranks on {hvd.cross_size()} host(s)"
    if speaks:
        print(f"# {title}; horoplug {hvd.__version__}, load {os.getloadavg()[0]:.2f}")
        print("#" + " ".join(f"{name:>{width}}" for name, (_, width, _) in COLUMNS.items()))
        units = ((f"({unit})" if unit else "", width) for unit, width, _ in COLUMNS.values())
        print("#" + " ".join(f"{unit:>{width}}" for unit, width in units), flush=True)
    found = []
    for row in _rows(hvd, args, dtype):
        found.append(row)
        if speaks:
            cells = ((row[name], width, form) for name, (_, width, form) in COLUMNS.items())
            print(
                " " + " ".join(f"{value:>{width}{form}}" for value, width, form in cells),
                flush=True,
            )
    wrong = sum(row["wrong"] for row in found)
    if speaks:
        print(f"# wrong results: {wrong}")
        if args.json:
            record = {
                "title": title,
                "version": hvd.__version__,
                "ranks": hvd.size(),
                "rows": found,
            }
            Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    hvd.shutdown()
    return 1 if wrong else 0


def _without_np(words: list[str]) -> list[str]:
    at = next(i for i, word in enumerate(words) if word.startswith("-np"))
    return words[:at] + words[at + (2 if words[at] == "-np" else 1) :]
