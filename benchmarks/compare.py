"""Whether this checkout is slower than another commit: benchmarks with the packages of both, by turns.

    make bench-compare BASE=main                         (builds both first)
    make bench-compare BASE=v0.2.0 ROUNDS=15 ONLY="allreduce gradients"
    python benchmarks/compare.py /path/to/checkout       (which is built)

Short jobs of this checkout's benchmarks alternate between the package of the base and that of this checkout. A row
is a figure of a benchmark: ``base`` and ``new`` are its medians over the jobs, ``ratio`` is new over base, as the
median of the ratios of neighbouring jobs, and ``spread`` the interquartile range of these ratios. ``moved`` is
``slower`` or ``faster`` if the ratio differs from 1 by more than the spread; fewer than five ratios say nothing.

If a row is slower by more than its spread and by more than ``--threshold``, its benchmark is measured again, in one
round more than before, since noise makes one of many rows look slower in a few rounds. If the row of all rounds is
still slower, or if a benchmark fails with the new package, the exit status is 1. A benchmark that fails with the base
has a row that says so.

``--out`` keeps the builds, and the results of each pair of jobs, by the commits and by their uncommitted changes. A
command that is repeated measures what is missing.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import suite
from harness import machine, whole_job
from harness.by_turns import Better, Ratios, order
from harness.checkout import Checkout, built, identified
from harness.job import BUILD, command_line, options_of
from harness.record import Column, Record

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600.0  # seconds for one job
ABOUT = """Jobs of each benchmark alternate between the package of another commit, the base, and that of this checkout.
Ratio: new over base, the median of the ratios of neighbouring jobs; spread: their interquartile range."""

COLUMNS = {
    "benchmark": Column("benchmark", width=12),
    "row": Column("row", width=29),
    "figure": Column("figure", width=12),
    "base": Column("base", form=".2f", width=10),
    "new": Column("new", form=".2f", width=10),
    "ratio": Column("ratio", "new/base", ".3f", 8),
    "spread": Column("spread", form=".3f", width=7),
    "pairs": Column("pairs", width=5),
    "moved": Column("moved", width=7),
}


class Part(NamedTuple):
    """A benchmark: the options of a short job and of a tiny one, for tests; the columns that identify a row of its
    record, and the columns that are compared. Of the rows, only those that begin with ``begin``."""

    program: str
    options: str
    tiny: str
    key: tuple[str, ...]
    figures: Mapping[str, Better]
    begin: str = ""


LESS, MORE = Better.LESS, Better.MORE
# One job of each takes a minute together, on two cores.
PARTS = [
    Part(
        "allreduce",
        "-np 2 -b 4 -e 4M -f 32",
        "-np 2 -b 4 -e 64 -f 16 -n 5",
        ("size",),
        {"time": LESS},
    ),
    Part(
        "gradients",
        "-np 2 --model resnet50 --model 200x1KiB -n 25",
        "-np 2 --model 7x1KiB -n 2",
        ("model", "variant"),
        {"time": LESS},
    ),
    Part(
        "train",
        "-np 2 --steps 30 --blocks 5",
        "-np 2 --model cnn --steps 2 --blocks 1",
        ("variant", "model"),
        {"rate": MORE},
        "horoplug",  # the others send nothing
    ),
    Part(
        "torch_hooks",
        "-np 2 --cpu --iterations 25",
        "-np 2 --cpu --parameters 20 --iterations 3",
        ("parameters",),
        {"hooks": LESS, "backward": LESS, "finish": LESS},
    ),
    Part(
        "loops",
        "-np 2 --rounds 5 --blocks 4",
        "-np 2 --tensors 8 --rounds 1 --blocks 1",
        ("loop",),
        {"mean": LESS},
    ),
]

Key = tuple[str, str]
"""The row of a benchmark, and the column of the figure."""


def figures(part: Part, record: Mapping[str, Any]) -> Iterator[tuple[Key, float]]:
    """The compared figures of a record, without those that are not above zero, such as a difference of times."""
    for row in record["rows"]:
        name = " ".join(str(row[column]) for column in part.key)
        for column in part.figures if name.startswith(part.begin) else ():
            if row[column] is not None and row[column] > 0:
                yield (name, column), row[column]


class Compared(NamedTuple):
    """A row of the table."""

    name: str
    figure: str
    base: float
    new: float
    ratios: Ratios
    better: Better

    def is_slower(self, threshold: float) -> bool:
        return self.ratios.moved(self.better, threshold) == "slower"


def compared(part: Part, pairs: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """The rows of a benchmark from pairs of its records, named ``base`` and ``new``."""
    found: dict[Key, list[tuple[float, float]]] = {}
    titles: dict[str, str] = {}
    for pair in pairs:
        for name, column in pair["new"]["columns"].items():
            titles[name] = f"{column['title']} {column['unit']}".strip()
        new = dict(figures(part, pair["new"]))
        for key, value in figures(part, pair["base"]):
            if key in new:
                found.setdefault(key, []).append((value, new[key]))
    return [
        Compared(
            name,
            titles[column],
            statistics.median(base for base, _ in values),
            statistics.median(new for _, new in values),
            Ratios.of([new / base for base, new in values]),
            part.figures[column],
        )
        for (name, column), values in found.items()
    ]


class Failure(Exception):
    """A job has failed. ``build``: base or new."""

    def __init__(self, build: str, text: str) -> None:
        super().__init__(text)
        self.build = build


class Comparison:
    """The pairs of jobs of two checkouts. Results are kept in ``folder``."""

    def __init__(self, base: Checkout, new: Checkout, folder: Path, is_tiny: bool) -> None:
        self.builds = {"base": base, "new": new}
        self.folder = folder
        self.is_tiny = is_tiny
        self.pairs: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, Failure] = {}
        self.loads: list[float] = []
        self.reused = 0

    def measure(self, parts: Iterable[Part], rounds: range) -> None:
        """A pair of jobs of each part in each round. A part that fails is not run again."""
        for number in rounds:
            for part in parts:
                if part.program not in self.failures:
                    try:
                        pair = self._pair(part, number)
                    except Failure as failure:
                        self.failures[part.program] = failure
                        _say(f"{part.program} fails with the {failure.build} package: {failure}")
                        continue
                    self.loads.append(pair["load"])
                    self.pairs.setdefault(part.program, []).append(pair)

    def rows(self, part: Part) -> list[Compared]:
        return compared(part, self.pairs.get(part.program, []))

    def _pair(self, part: Part, number: int) -> dict[str, Any]:
        """The records of two neighbouring jobs. They are kept together: jobs of different times are not compared."""
        options = part.tiny if self.is_tiny else part.options
        file = self.folder / f"{part.program}-{number}.json"
        if file.exists():
            kept: dict[str, Any] = json.loads(file.read_text())
            if kept["options"] == options:
                self.reused += 1
                return kept
        load = machine.load()
        pair: dict[str, Any] = {"options": options, "load": load}
        failure = None
        for build in order(number, "base", "new"):
            try:
                pair[build] = self._job(part, options, build)
            except Failure as error:
                failure = error if build == "new" else failure or error
        if identified(ROOT) != self.builds["new"]:
            raise SystemExit(
                "the checkout has been changed: its results would be those of two versions"
            )
        if failure:
            raise failure
        temporary = file.with_suffix(".part")
        temporary.write_text(json.dumps(pair))
        temporary.rename(file)
        _say(f"round {number + 1}: {part.program}, load {load:.2f}")
        return pair

    def _job(self, part: Part, options: str, build: str) -> dict[str, Any]:
        """The record of a job with the package of the build. Errors: Failure."""
        checkout = self.builds[build].folder
        environment = {**os.environ, "PYTHONPATH": str(checkout), BUILD: str(checkout)}
        log = self.folder / f"{part.program}-{build}.log"
        # Not in a checkout: the launcher would import the package of the working directory.
        with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
            command = suite.Part("record", part.program, options).command(Path(folder))
            try:
                whole_job.run(command, environment, LIMIT, Path(folder), output)
                record: dict[str, Any] = json.loads(Path(folder, "record.json").read_text())
            except (OSError, RuntimeError) as error:
                lines = log.read_text(errors="replace").splitlines() or [str(error)]
                # The launcher's last line says which rank ended first, and an earlier one why.
                reason = [line for line in lines if "Error: " in line] or lines
                raise Failure(build, f"{reason[-1].strip()} ({log})") from error
            return record


def written(
    comparison: Comparison, parts: Iterable[Part], record: Record, threshold: float
) -> bool:
    """Add the rows to the table. Returns whether this checkout may be slower than the base, or cannot be compared."""
    bad = False
    for part in parts:
        for row in comparison.rows(part):
            record.row(
                benchmark=part.program,
                row=row.name,
                figure=row.figure,
                base=row.base,
                new=row.new,
                ratio=row.ratios.median,
                spread=row.ratios.spread if row.ratios.pairs > 1 else None,
                pairs=row.ratios.pairs,
                moved=row.ratios.moved(row.better),
            )
            if row.is_slower(threshold):
                bad = True
                record.note(
                    f"slower by more than {threshold:.0%}: {part.program}, {row.name}, {row.figure}"
                )
        if failure := comparison.failures.get(part.program):
            bad |= failure.build == "new"
            record.row(benchmark=part.program, moved=f"fails with {failure.build}")
            record.note(f"{part.program} fails with the {failure.build} package: {failure}")
    if not comparison.pairs:
        record.note("nothing was compared")
    return bad or not comparison.pairs


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("base", help="a commit, which is built, or the folder of a checkout that is built")
    add("--rounds", type=int, default=7, help="jobs of each benchmark with each package [7]")
    add(
        "--only",
        default="",
        metavar="NAMES",
        help=f"benchmarks, separated by spaces, of {', '.join(part.program for part in PARTS)} [all]",
    )
    add("--threshold", type=float, default=3.0, help="percent by which a row may be slower [3]")
    add(
        "--out",
        type=Path,
        default=ROOT / "build" / "compare",
        help="folder for builds and results [build/compare]",
    )
    add("--tiny", action="store_true", help="jobs that only show that the benchmarks run")
    args = parser.parse_args()
    only = args.only.split() or [part.program for part in PARTS]
    parts = [part for part in PARTS if part.program in only]
    if unknown := set(only) - {part.program for part in parts}:
        parser.error(f"--only: no such benchmark: {', '.join(sorted(unknown))}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    args.out = args.out.resolve()
    new = identified(ROOT)
    base = (
        identified(Path(args.base))
        if Path(args.base).is_dir()
        else built(ROOT, args.base, args.out)
    )
    folder = args.out / "results" / f"{base.name}..{new.name}"
    folder.mkdir(parents=True, exist_ok=True)
    options = {**options_of(args), "base": base.name, "new": new.name}
    del options["out"]
    title = f"{new.name} beside {base.name}"
    threshold = args.threshold / 100
    record = Record("compare", title, ABOUT, COLUMNS, [], ranks=1, options=options)
    comparison = Comparison(base, new, folder, args.tiny)
    comparison.measure(parts, range(args.rounds))
    suspected = [
        part for part in parts if any(row.is_slower(threshold) for row in comparison.rows(part))
    ]
    comparison.measure(suspected, range(args.rounds, 2 * args.rounds + 1))
    bad = written(comparison, parts, record, threshold)
    if comparison.reused:
        record.note(
            f"pairs of jobs that had been measured before: {comparison.reused} (in {folder})"
        )
    if loads := comparison.loads:
        record.note(
            f"load before the pairs of jobs: {min(loads):.2f} to {max(loads):.2f}; {os.cpu_count()} cores"
        )
    return record.end(args.json) or int(bad)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the job ends, too
    sys.exit(main())
