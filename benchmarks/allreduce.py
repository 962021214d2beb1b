"""Speed of the collectives by message size, like nccl-tests, with a check of the results.

    horovodrun -np 2 python benchmarks/allreduce.py -b 8 -e 256M -f 2
    python benchmarks/allreduce.py -np 2 --collective allgather --dtype float16     (starts the ranks itself)

``--peer torch-gloo``, ``--peer mpi4py`` or ``--peer horovod`` measures that library in the same run, in alternating
blocks of iterations; ``ratio`` is the library's median over horoplug's median. With ``-np``, mpirun starts the ranks if
a peer needs MPI; ``--peer mpi4py:mpich`` selects one of several MPIs.

The time of an iteration is the time on its slowest rank. ``time`` is the median of the iterations, ``p99`` their 99th
percentile, ``spread`` the interquartile range over the median. ``algbw`` is size over time; ``busbw`` is the least
number of bytes that each rank must send or receive, over time (nccl-tests, doc/PERFORMANCE.md), in 10^9 bytes per
second. Buffers hold zeros in timed iterations, and other values for the check of the results.
``sendrecv`` is a round trip between pairs of ranks: one sends and then receives, the other answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from harness.clock import Summary, alternate, geometric_mean
from harness.job import byte_count, command_line, job, options_of, parse
from harness.peers import OPS, PEERS, Case, Peer, Prepared, partner_of
from harness.record import Column, Plot, Record

ABOUT = """One collective, called repeatedly from Python on NumPy arrays of one size, in place if the library has that
variant. Times are medians over the iterations; the time of an iteration is that of its slowest rank."""

COLUMNS = {
    "size": Column("size", "B", width=10),
    "count": Column("count", "elements", width=10),
    "library": Column("library", width=14),
    "iterations": Column("n", form="d", width=5),
    "time": Column("time", "µs", ".2f", 11),
    "p99": Column("p99", "µs", ".2f", 11),
    "spread": Column("spread", "%", ".0f", 6),
    "algbw": Column("algbw", "GB/s", ".3f", 8),
    "busbw": Column("busbw", "GB/s", ".3f", 8),
    "ratio": Column("ratio", "x", ".2f", 7),
    "wrong": Column("#wrong", form="d", width=6),
}


class Collective(NamedTuple):
    """``size`` of the table over the input's size, and busbw over algbw, both by number of ranks."""

    size_factor: Callable[[int], int]
    bus_factor: Callable[[int], float]
    divided: bool  # the size is a multiple of the number of ranks
    reduces: bool


COLLECTIVES = {
    "allreduce": Collective(lambda n: 1, lambda n: 2 * (n - 1) / n, False, True),
    "allgather": Collective(lambda n: n, lambda n: (n - 1) / n, True, False),
    "broadcast": Collective(lambda n: 1, lambda n: 1.0, False, False),
    "alltoall": Collective(lambda n: 1, lambda n: (n - 1) / n, True, False),
    "reducescatter": Collective(lambda n: 1, lambda n: (n - 1) / n, True, True),
    "sendrecv": Collective(lambda n: 1, lambda n: 2.0, False, False),
}


# ---- the check -------------------------------------------------------------------------------------------------------


def pattern(case: Case, rank: int) -> np.ndarray:
    """The pattern that a rank's input repeats: small numbers, so that every dtype represents the result exactly."""
    start = np.arange(4) + rank
    return (1 + start % 2 if case.op == "prod" else start % 4).astype(case.dtype)


def values(case: Case, rank: int) -> np.ndarray:
    return np.resize(pattern(case, rank), case.count)


def expected(case: Case, rank: int, size: int) -> np.ndarray:
    part = slice(rank * (case.count // size), (rank + 1) * (case.count // size))
    if case.collective == "broadcast":
        return values(case, 0)
    if case.collective == "sendrecv":
        return values(case, partner_of(rank, size))
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


def wrong_elements(hvd: Any, case: Case, prepared: Prepared) -> int:
    """The number of elements with a wrong result, summed over all ranks."""
    prepared.x[:] = values(case, hvd.rank())
    got, right = prepared.result(), expected(case, hvd.rank(), hvd.size())
    wrong = right.size if got.size != right.size else int(np.count_nonzero(got != right))
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])


# ---- the sweep -------------------------------------------------------------------------------------------------------


def sizes(begin: int, end: int, factor: float) -> Iterator[int]:
    size = float(begin)
    while round(size) <= end:
        yield round(size)
        size *= factor


def sweep(args: Any, hvd: Any, libraries: list[Peer], record: Record) -> None:
    """Rows for each size: one for each library."""
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
        prepared = [library.prepare(case) for library in libraries]
        wrong = [wrong_elements(hvd, case, one) for one in prepared]
        for one in prepared:
            one.x[:] = 0
        iterations = args.iterations or min(1000, max(20, 2**28 // max(1, size)))
        own = None
        times = alternate(hvd, [one.run for one in prepared], iterations)
        for library, seconds, bad in zip(libraries, times, wrong, strict=True):
            summary = Summary.of(seconds)
            own = own or summary.median
            record.row(
                size=size,
                count=count,
                library=library.name,
                iterations=len(seconds),
                time=summary.median * 1e6,
                p99=summary.p99 * 1e6,
                spread=summary.spread * 100,
                algbw=size / summary.median / 1e9,
                busbw=size / summary.median / 1e9 * collective.bus_factor(ranks),
                ratio=summary.median / own,
                wrong=bad,
            )


def compare(record: Record, peers: list[str]) -> None:
    for peer in peers:
        rows = [row for row in record.rows if row["library"] == peer]
        if rows:
            least = min(rows, key=lambda row: row["ratio"])
            record.note(
                f"{peer} takes {geometric_mean([row['ratio'] for row in rows]):.2f} times as long as horoplug in "
                f"geometric mean, and at least {least['ratio']:.2f} times (at {least['size']} B)"
            )


def find_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def main() -> int:
    parser = command_line(__doc__, tuple(PEERS))
    add = parser.add_argument
    add("-b", dest="begin", type=byte_count, default=8, help="smallest size in bytes [8]")
    add("-e", dest="end", type=byte_count, default=2**28, help="largest size [256M]")
    add("-f", dest="factor", type=float, default=2.0, help="factor between sizes [2]")
    add("-n", dest="iterations", type=int, default=0, help="iterations [20 to 1000, by size]")
    add("--collective", choices=COLLECTIVES, default="allreduce")
    add("--op", choices=OPS, default="sum")
    add("--dtype", default="float32", help="NumPy's name of a type, or bfloat16 [float32]")
    args = parse(parser)
    if args.begin < 1 or args.factor <= 1:
        parser.error("-b must be at least 1, and -f greater than 1")
    if args.collective == "reducescatter" and args.op not in ("sum", "avg"):
        parser.error("reducescatter supports --op sum and avg only")
    with job(args) as (own, peers):
        hvd = own.hvd
        what = f"{args.collective} ({args.op})" if args.op != "sum" else args.collective
        record = Record(
            "allreduce",
            f"{what}, {args.dtype}, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [
                Plot("lines", "size", "time", "library"),
                Plot("lines", "size", "ratio", "library"),
            ],
            ranks=hvd.size(),
            options=options_of(args),
            peers=peers,
            speaks=hvd.rank() == 0,
        )
        sweep(args, hvd, [own, *peers], record)
        compare(record, [peer.name for peer in peers])
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
