"""The allreduce within one host, called from C++, compared with MPI's and oneCCL's: float32 in place, alternating.

    make cpp-release mpi && python benchmarks/raw.py --ranks 2

Horoplug's part is build/release/bin/allreduce_bench: processes that share memory, with the engine's algorithms but
without engine, negotiation and Python. ``horoplug`` reduces private memory of each rank; ``horoplug shared`` reduces
buffers that the ranks share, like gradients in bucket views. raw_mpi.c calls each MPI and is compiled by that MPI's
mpicc (Intel MPI's wheel has no mpicc and runs the program that MPICH's has compiled); raw_ccl.cpp calls oneCCL. In each
turn every library runs once, in new processes; the result is the median over the turns. ``copy`` is the least number of
bytes to read and write, 2 * ranks * size, over the time, in percent of the rate at which all ranks together copy arrays
of that size. No program accesses the buffers between two calls.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

from harness import mpi
from harness.job import command_line, options_of
from harness.record import Column, Plot, Record

from horoplug.bench.cases import byte_count

HERE = Path(__file__).resolve().parent
BINARY = "allreduce_bench"
OURS = ("horoplug", "horoplug shared")
HOPELESS = 100  # a library that takes this many times the fastest time, from 64 KiB up, is left out at larger sizes
ONECCL = mpi.BUILD / "oneccl" / "raw_ccl"

ABOUT = """The allreduce within one host, called from C++ on float32 in place, without engine and Python, beside MPI's
and oneCCL's called from C and C++. Horoplug averages, the others only add. "horoplug shared": in buffers that the ranks
share, like gradients in bucket views. Ratio: the time of the fastest other library over that of this row."""

COLUMNS = {
    "size": Column("size", "B", width=10),
    "library": Column("library", width=16),
    "time": Column("time", "us", ".2f", 11),
    "ratio": Column("ratio", "", ".2f", 7),
    "copy": Column("copy", "%", ".0f", 6),
}


class Contender(NamedTuple):
    """A library's program, which prints a line ``bytes microseconds …`` for each size."""

    name: str
    command: list[str]
    env: dict[str, str]

    def measure(self, size: int, timeout: float) -> list[str]:
        """The words of its line. Raises CalledProcessError, TimeoutExpired or ValueError."""
        done = subprocess.run(
            [*self.command, str(size)],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        )
        for line in done.stdout.splitlines():
            words = line.split()
            if words and words[0].isdigit():
                return words
        raise ValueError(f"{self.name} has measured nothing: {done.stdout}{done.stderr}")


def contenders(ranks: int, seconds: float, folder: Path) -> list[Contender]:
    """Horoplug and the installed libraries."""
    binary = HERE.parent / "build" / "release" / "bin" / BINARY
    if not binary.exists():
        raise SystemExit(f"{binary} is not built: make cpp-release")
    ours = [str(binary), "-n", str(ranks), "-t", str(seconds)]
    found = [Contender(OURS[0], ours, {}), Contender(OURS[1], [*ours, "-r"], {})]
    programs: dict[str, Path] = {}  # by ABI
    for name in mpi.installed():
        installation = mpi.find(name)
        assert installation is not None
        abi = mpi.KINDS[name].abi
        compiler = installation.mpirun.parent / "mpicc"
        env = installation.environment()
        if compiler.exists():
            programs[abi] = folder / name
            command = [str(compiler), "-O2", "-o", str(programs[abi]), str(HERE / "raw_mpi.c")]
            subprocess.run(command, check=True, env={**os.environ, **env})
        start = [str(installation.mpirun), "-np", str(ranks)]
        if abi in programs:
            found.append(Contender(name, [*start, str(programs[abi]), str(seconds)], env))
        if name == "impi" and ONECCL.exists():
            # Without a separate progress thread, which would take cores from the ranks.
            settings = {
                "CCL_ATL_TRANSPORT": "mpi",
                "CCL_LOG_LEVEL": "error",
                "CCL_WORKER_OFFLOAD": "0",
            }
            env = {**env, **settings}
            found.append(Contender("oneccl", [*start, str(ONECCL), str(seconds)], env))
    return found


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of ranks [2]")
    add("-b", type=byte_count, default=4, metavar="SIZE", help="smallest size in bytes [4]")
    add("-e", type=byte_count, default=2**28, metavar="SIZE", help="largest size [256M]")
    add("-f", type=int, default=4, metavar="FACTOR", help="factor between sizes [4]")
    add("--turns", type=int, default=5, help="runs of each library at each size [5]")
    add("--seconds", type=float, default=0.2, help="duration of a run in seconds [0.2]")
    add("--timeout", type=float, default=120, help="time limit of a run in seconds [120]")
    args = parser.parse_args()

    record = Record(
        "raw",
        f"Allreduce on one host without engine and Python, {args.ranks} ranks",
        ABOUT,
        COLUMNS,
        [Plot("lines", "size", "time", "library"), Plot("lines", "size", "ratio", "library")],
        ranks=1,  # the programs start the ranks themselves
        options=options_of(args),
    )
    with tempfile.TemporaryDirectory() as folder:
        libraries = contenders(args.ranks, args.seconds, Path(folder))
        ratios: dict[str, list[float]] = defaultdict(list)
        size = args.b
        while size <= args.e:
            times, copies = measure(libraries, size, args.turns, args.timeout)
            others = [time for name, time in times.items() if name not in OURS]
            for name, time in times.items():
                ratio = min(others) / time if name in OURS and others else None
                if ratio is not None:
                    ratios[name].append(ratio)
                record.row(size=size, library=name, time=time, ratio=ratio, copy=copies.get(name))
            hopeless = [
                library
                for library in libraries
                if size >= 2**16 and is_hopeless(times, library.name)
            ]
            for library in hopeless:
                libraries.remove(library)
                record.note(
                    f"{library.name} takes more than {HOPELESS} times as long as the fastest at {size} B, and is left "
                    "out from there on"
                )
            size *= args.f
    for name, values in ratios.items():
        record.note(
            f"{name}: {geometric_mean(values):.2f} times as fast as the fastest other library at each size, in "
            f"geometric mean; at least {min(values):.2f} times"
        )
    return record.end(args.json)


def is_hopeless(times: dict[str, float], name: str) -> bool:
    """Whether a library is too slow to measure larger sizes: a library that spins loses whole time slices if ranks
    share a core."""
    return name not in OURS and times.get(name, math.inf) > HOPELESS * min(times.values())


def measure(
    libraries: list[Contender], size: int, turns: int, timeout: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds by library, and ``copy`` in percent for horoplug's. Libraries that have failed in every turn
    are missing."""
    times: dict[str, list[float]] = defaultdict(list)
    copies: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        for library in libraries:
            try:
                words = library.measure(size, timeout)
            except (subprocess.SubprocessError, ValueError) as error:
                print(f"# {library.name}: {error}", file=sys.stderr)
                continue
            times[library.name].append(float(words[1]))
            if library.name in OURS:
                copies[library.name].append(float(words[3].rstrip("%")))
    return (
        {name: median(values) for name, values in times.items()},
        {name: median(values) for name, values in copies.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
