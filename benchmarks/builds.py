"""Two builds of horoplug by turns, such as the wheel and what this machine's compiler has built.

    python benchmarks/builds.py /path/to/environment/bin/python

Jobs of two ranks, which measure an allreduce of each size and dtype, alternate between the horoplug of this Python and
that of the other one. ``time`` is the median over the jobs of this build of the median iteration on the slowest rank;
``ratio`` is the time of the other build over the time of this one, as the median of the ratios of neighbouring jobs.
``spread`` is the interquartile range of these ratios: a ratio that differs from 1 by less says nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.by_turns import Ratios, order
from harness.job import LAUNCH, command_line, options_of
from harness.record import Column, Plot, Record

ABOUT = """An allreduce by two ranks of one host, called from Python, with two builds of the core; jobs of both
alternate."""

COLUMNS = {
    "dtype": Column("dtype", width=8),
    "size": Column("size", "B", width=10),
    "time": Column("time", "µs", ".2f", 11),
    "other": Column("other", "µs", ".2f", 11),
    "ratio": Column("ratio", "x", ".3f", 7),
    "spread": Column("spread", "x", ".3f", 7),
}
SIZES = (4, 4096, 65536, 1 << 20, 16 << 20)
DTYPES = ("float32", "float16", "float64", "int32")
RANK = """
import json, sys, time
import numpy as np
import horoplug as hvd

hvd.init()
found = {}
for dtype in sys.argv[1].split(","):
    for size in map(int, sys.argv[2].split(",")):
        x = np.zeros(max(1, size // np.dtype(dtype).itemsize), dtype)
        rounds = min(400, max(8, (1 << 26) // size))
        times = []
        for round in range(rounds + 20):
            begin = time.perf_counter()
            hvd.allreduce_(x, op=hvd.Sum, name=f"{dtype}.{size}")
            times.append(time.perf_counter() - begin)
        slowest = hvd.allreduce(np.array(times[20:]), op=hvd.Max)
        found[f"{dtype} {size}"] = float(np.median(slowest))
if hvd.rank() == 0:
    with open(sys.argv[3], "w") as file:
        json.dump(found, file)
hvd.shutdown()
"""


def measure(python: str) -> dict[str, float]:
    """Seconds by dtype and size. Errors: RuntimeError if the job fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times"
        words = [",".join(DTYPES), ",".join(map(str, SIZES)), str(file)]
        command = [python, "-c", LAUNCH, "-np", "2", python, "-c", RANK, *words]
        # Not in the checkout, whose horoplug every Python would import.
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"a job with {python} has failed")
        return dict(json.loads(file.read_text()))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("other", help="the Python of an environment with the other build")
    parser.add_argument("--rounds", type=int, default=15, help="jobs of each build [15]")
    args = parser.parse_args()
    options = options_of(args)
    plots = [Plot("lines", "size", "ratio", "dtype")]
    record = Record("builds", "two builds", ABOUT, COLUMNS, plots, ranks=2, options=options)
    mine: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(args.rounds):
        for python, found in order(number, (args.other, theirs), (sys.executable, mine)):
            found.append(measure(python))
    for key in mine[0]:
        ratios = Ratios.of([b[key] / a[key] for a, b in zip(mine, theirs, strict=True)])
        dtype, size = key.split()
        record.row(
            dtype=dtype,
            size=int(size),
            time=statistics.median(one[key] for one in mine) * 1e6,
            other=statistics.median(one[key] for one in theirs) * 1e6,
            ratio=ratios.median,
            spread=ratios.spread,
        )
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
