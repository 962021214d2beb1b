"""Speed of the collectives by message size, like nccl-tests, with a check of the results.

    horovodrun -np 2 python benchmarks/allreduce.py -b 8 -e 256M -f 2
    python benchmarks/allreduce.py -np 2 --collective allgather --dtype float16     (starts the ranks itself)

``--peer torch-gloo``, ``--peer mpi4py`` or ``--peer horovod`` measures that library in the same run, in alternating
blocks of iterations, ``--peer horoplug-torch`` horoplug's functions on PyTorch tensors, and ``--peer torch-horoplug``
``torch.distributed`` on horoplug; ``ratio`` is the library's median over horoplug's median. With ``-np``, mpirun starts
the ranks if a peer needs MPI; ``--peer mpi4py:mpich`` selects one of several MPIs.

The time of an iteration is the time on its slowest rank. ``time`` is the median of the iterations, ``p99`` their 99th
percentile, ``spread`` the interquartile range over the median. ``algbw`` is size over time; ``busbw`` is the least
number of bytes that each rank must send or receive, over time (nccl-tests, doc/PERFORMANCE.md), in 10^9 bytes per
second. Buffers hold zeros in timed iterations, and other values for the check of the results.
``cores`` is the time of a cache line from one core to another and back, the larger one of before and after the size:
in a virtual machine, cores may share a cache at one time and not at another, which changes all figures several times.
``sendrecv`` is a round trip between pairs of ranks: one sends and then receives, the other answers. ``barrier`` has no
data and is measured once, in the row of the smallest size.
"""

from __future__ import annotations

import sys
from typing import Any

from harness.clock import Summary, alternate, geometric_mean
from harness.job import command_line, job, options_of, parse
from harness.peers import PEERS, Peer
from harness.record import Column, Plot, Record

from horoplug.bench.cases import (
    COLLECTIVES,
    OPS,
    byte_count,
    cases,
    find_dtype,
    iterations_of,
    sizes,
    wrong_elements,
)

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
    "trip": Column("cores", "ns", ".0f", 6),
    "wrong": Column("#wrong", form="d", width=6),
}


def sweep(args: Any, hvd: Any, libraries: list[Peer], record: Record) -> None:
    """Rows for each size: one for each library."""
    ranks, dtype = hvd.size(), find_dtype(args.dtype)
    wanted = sizes(args.begin, args.end, args.factor)
    bus_factor = COLLECTIVES[args.collective].bus_factor(ranks)
    before = record.measure_cores()
    for size, case in cases(args.collective, dtype, args.op, wanted, ranks):
        prepared = [library.prepare(case) for library in libraries]
        wrong = [wrong_elements(hvd, case, one) for one in prepared]
        own = None
        iterations = args.iterations or iterations_of(size)
        times = alternate(hvd, [one.run for one in prepared], iterations)
        after = record.measure_cores()
        trip = max((trip for trip in (before, after) if trip is not None), default=None)
        before = after
        for library, seconds, bad in zip(libraries, times, wrong, strict=True):
            summary = Summary.of(seconds)
            own = own or summary.median
            record.row(
                size=size,
                count=case.count,
                library=library.name,
                iterations=len(seconds),
                time=summary.median * 1e6,
                p99=summary.p99 * 1e6,
                spread=summary.spread * 100,
                algbw=size / summary.median / 1e9,
                busbw=size / summary.median / 1e9 * bus_factor,
                ratio=summary.median / own,
                trip=trip,
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
        own_ways = {"horoplug-torch", "torch-horoplug"}
        where = ", in PyTorch" if own_ways & {peer.name for peer in peers} else ""
        record = Record(
            "allreduce",
            f"{what}, {args.dtype}{where}, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
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
