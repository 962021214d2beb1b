"""Speed of the collectives by size, in the manner of nccl-tests, with a check of the results.

    horovodrun -np 2 python benchmarks/allreduce.py -b 8 -e 256M -f 2
    python benchmarks/allreduce.py -np 2 --collective allgather --dtype float16     (starts the ranks itself)

``--peer torch-gloo`` or ``--peer mpi4py`` measures that library in the same run, in alternating blocks of iterations,
and prints how many times horoplug's median its median is. With ``-np``, mpi4py's ranks are started by mpirun.

An iteration takes as long as on its slowest rank; ``time`` is the median of the iterations, ``p99`` their 99th
percentile. ``algbw`` is size over time; ``busbw`` is what each rank must at least have sent or received over time
(nccl-tests, doc/PERFORMANCE.md), in 10^9 bytes per second. Buffers hold zeros while the clock runs, and other values
for the check.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import under_mpi
from peers import OPS, PEERS, Case, Horoplug, Run

BLOCKS = 5  # of iterations, between which horoplug and the peer take turns


class Collective(NamedTuple):
    """``size`` of the table over the input's size, and busbw over algbw, both by number of ranks."""

    size_factor: Callable[[int], int]
    bus_factor: Callable[[int], float]
    divided: bool  # the size is made of one part for each rank
    reduces: bool


COLLECTIVES = {
    "allreduce": Collective(lambda n: 1, lambda n: 2 * (n - 1) / n, False, True),
    "allgather": Collective(lambda n: n, lambda n: (n - 1) / n, True, False),
    "broadcast": Collective(lambda n: 1, lambda n: 1.0, False, False),
    "alltoall": Collective(lambda n: 1, lambda n: (n - 1) / n, True, False),
    "reducescatter": Collective(lambda n: 1, lambda n: (n - 1) / n, True, True),
}


# ---- the check -------------------------------------------------------------------------------------------------------


def pattern(case: Case, rank: int) -> np.ndarray:
    """What a rank's input repeats: small numbers, so that every dtype holds the exact result."""
    start = np.arange(4) + rank
    return (1 + start % 2 if case.op == "prod" else start % 4).astype(case.dtype)


def values(case: Case, rank: int) -> np.ndarray:
    return np.resize(pattern(case, rank), case.count)


def expected(case: Case, rank: int, size: int) -> np.ndarray:
    part = slice(rank * (case.count // size), (rank + 1) * (case.count // size))
    if case.collective == "broadcast":
        return values(case, 0)
    if case.collective == "allgather":
        return np.concatenate([values(case, r) for r in range(size)])
    if case.collective == "alltoall":
        return np.concatenate([values(case, r)[part] for r in range(size)])
    reducers: dict[str, Callable[..., Any]] = {"min": np.min, "max": np.max, "prod": np.prod}
    reduce = reducers.get(case.op, np.sum)
    total = reduce([pattern(case, r).astype(np.float64) for r in range(size)], axis=0)
    if case.op == "avg":
        total /= size
    result = np.resize(total.astype(case.dtype), case.count)
    return result[part] if case.collective == "reducescatter" else result


def wrong_elements(hvd: Any, case: Case, x: np.ndarray, run: Run) -> int:
    """Elements with a wrong result, on all ranks together."""
    x[:] = values(case, hvd.rank())
    got, right = np.asarray(run()).ravel(), expected(case, hvd.rank(), hvd.size())
    wrong = right.size if got.size != right.size else int(np.count_nonzero(got != right))
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])


# ---- the clock -------------------------------------------------------------------------------------------------------


def measure(hvd: Any, runs: list[Run], iterations: int) -> list[np.ndarray]:
    """Seconds of each iteration of each run, on its slowest rank; the runs take turns in blocks."""
    clock = time.perf_counter
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(BLOCKS):
        for run, times in zip(runs, seconds, strict=True):
            for _ in range(max(2, iterations // 20)):  # warm-up
                run()
            hvd.barrier()
            for _ in range(-(-iterations // BLOCKS)):
                start = clock()
                run()
                times.append(clock() - start)
    return [hvd.allreduce(np.array(times), op=hvd.Max, name="times") for times in seconds]


def sizes(begin: int, end: int, factor: float) -> Iterator[int]:
    size = float(begin)
    while round(size) <= end:
        yield round(size)
        size *= factor


def sweep(args: argparse.Namespace, hvd: Any, own: Horoplug, peer: Any) -> Iterator[dict[str, Any]]:
    """One row for each size."""
    collective, ranks = COLLECTIVES[args.collective], hvd.size()
    dtype = find_dtype(args.dtype)
    previous = 0
    for wanted in sizes(args.begin, args.end, args.factor):
        count = max(1, wanted // dtype.itemsize)
        if collective.divided:
            # An allgather's size is its output, whose parts are the ranks' inputs.
            count = max(1, count // ranks) * (ranks // collective.size_factor(ranks))
        if count == previous:
            continue
        previous = count
        case = Case(args.collective, dtype, args.op, count)
        size = count * dtype.itemsize * collective.size_factor(ranks)
        x, run = own.prepare(case)
        wrong = wrong_elements(hvd, case, x, run)
        x[:] = 0
        runs = [run]
        if peer is not None:
            peer_x, peer_run = peer.prepare(case)
            peer_x[:] = 0
            runs.append(peer_run)
        iterations = args.iterations or min(1000, max(20, 2**28 // max(1, size)))
        times = measure(hvd, runs, iterations)
        median = float(np.median(times[0]))
        row = {
            "size": size,
            "count": count,
            "dtype": args.dtype,
            "op": args.op if collective.reduces else "-",
            "iterations": len(times[0]),
            "time_us": median * 1e6,
            "p99_us": float(np.quantile(times[0], 0.99)) * 1e6,
            "algbw": size / median / 1e9,
            "busbw": size / median / 1e9 * collective.bus_factor(ranks),
            "wrong": wrong,
        }
        if peer is not None:
            theirs = float(np.median(times[1]))
            row |= {"peer_us": theirs * 1e6, "ratio": theirs / median}
        yield row


# ---- what is printed -------------------------------------------------------------------------------------------------


def machine() -> str:
    import horoplug
    from horoplug import _native

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, load {load:.2f}; Linux {platform.release()}, Python "
        f"{platform.python_version()}, horoplug {horoplug.__version__} ({_native.cpu_kernels()} kernels)"
    )


FORMATS = {
    "size": ("{:>12}", "{:>12d}"),
    "count": ("{:>12}", "{:>12d}"),
    "dtype": ("{:>9}", "{:>9}"),
    "op": ("{:>5}", "{:>5}"),
    "time_us": ("{:>11}", "{:>11.2f}"),
    "p99_us": ("{:>11}", "{:>11.2f}"),
    "algbw": ("{:>8}", "{:>8.3f}"),
    "busbw": ("{:>8}", "{:>8.3f}"),
    "wrong": ("{:>7}", "{:>7d}"),
    "peer_us": ("{:>11}", "{:>11.2f}"),
    "ratio": ("{:>7}", "{:>7.2f}"),
}
TITLES = {"time_us": "time", "p99_us": "p99", "wrong": "#wrong", "peer_us": "peer time"}
UNITS = {
    "size": "(B)",
    "count": "(elements)",
    "time_us": "(us)",
    "p99_us": "(us)",
    "algbw": "(GB/s)",
}
UNITS |= {"busbw": "(GB/s)", "peer_us": "(us)", "ratio": "(x)"}


def plot(path: str, rows: list[dict[str, Any]], title: str, peer: str | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    x = [row["size"] for row in rows]
    axes.loglog(x, [row["time_us"] for row in rows], "o-", label="horoplug")
    if peer:
        axes.loglog(x, [row["peer_us"] for row in rows], "s--", label=peer)
    axes.set(xlabel="size (bytes)", ylabel="median time (µs)", title=title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def find_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def byte_count(text: str) -> int:
    """``8``, ``64K``, ``256M`` or ``1G``; binary multiples, as in nccl-tests."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    unit = units.get(text[-1:].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-np", type=int, default=0, help="start this many ranks on this machine")
    add("-b", dest="begin", type=byte_count, default=8, help="smallest size in bytes [8]")
    add("-e", dest="end", type=byte_count, default=2**28, help="largest size [256M]")
    add("-f", dest="factor", type=float, default=2.0, help="step between sizes [2]")
    add("-n", dest="iterations", type=int, default=0, help="iterations [20 to 1000, by size]")
    add("--collective", choices=COLLECTIVES, default="allreduce")
    add("--op", choices=OPS, default="sum")
    add("--dtype", default="float32", help="NumPy's name of a type, or bfloat16 [float32]")
    add("--peer", choices=PEERS, help="another library to measure in the same run")
    add("--json", metavar="FILE", help="write the table there as well")
    add("--plot", metavar="FILE.png", help="draw time over size (needs matplotlib)")
    args = parser.parse_args()
    if args.begin < 1 or args.factor <= 1:
        parser.error("-b must be at least 1, and -f greater than 1")
    if args.collective == "reducescatter" and args.op not in ("sum", "avg"):
        parser.error("reducescatter knows --op sum and avg")
    rest = sys.argv[1:]
    if args.np:
        at = next(i for i, text in enumerate(rest) if text.startswith("-np"))
        del rest[at : at + (2 if rest[at] == "-np" else 1)]
    return args, rest


def main() -> int:
    args, rest = parse()
    if args.np:
        launch = "import sys; from horoplug.runner.launch import main; sys.exit(main())"
        script = [sys.executable, str(Path(__file__).resolve()), *rest]
        if args.peer == "mpi4py":
            under_mpi.start(args.np, script)
        launcher = [sys.executable, "-c", launch, "-np", str(args.np)]
        os.execv(sys.executable, [*launcher, *script])

    under_mpi.adopt_place()
    own = Horoplug()
    hvd = own.hvd
    peer: Any = PEERS[args.peer](hvd) if args.peer else None
    title = f"{args.collective}, {hvd.size()} ranks on {hvd.cross_size()} host(s)"
    first = hvd.rank() == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    where = machine()
    columns = [name for name in FORMATS if peer or name not in ("peer_us", "ratio")]
    say(f"# {title}" + (f"; peer: {args.peer}" if peer else ""))
    say(f"# {where}")
    for names in TITLES, UNITS:
        headings = [names.get(name, name if names is TITLES else "") for name in columns]
        say("#" + " ".join(FORMATS[n][0].format(h) for n, h in zip(columns, headings, strict=True)))
    rows = []
    for row in sweep(args, hvd, own, peer):
        rows.append(row)
        say(" " + " ".join(FORMATS[name][1].format(row[name]) for name in columns))
    wrong = sum(row["wrong"] for row in rows)
    mean = sum(row["busbw"] for row in rows) / len(rows) if rows else math.nan
    say(f"# wrong elements: {wrong}; mean busbw: {mean:.3f} GB/s")
    if first and args.json:
        Path(args.json).write_text(
            json.dumps(
                {"machine": where, "title": title, "peer": args.peer, "rows": rows}, indent=1
            )
        )
    if first and args.plot:
        plot(args.plot, rows, f"{title}, {args.dtype}", args.peer)
    if args.peer == "torch-gloo":
        peer.dist.destroy_process_group()
    hvd.shutdown()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
