"""Speed of training without any variable: horovodrun beside torchrun, and beside the best number of threads by hand.

    python benchmarks/defaults.py -np 2
    python benchmarks/defaults.py -np 2 --model cnn --framework torch --framework jax

Each job is a launcher with its ranks, which train for some seconds after a warm-up. Rounds of jobs alternate
between the variants, and each figure is the median over the rounds. ``ratio`` is the samples per second of a variant
over those of the best setting by hand: the largest of the jobs with 1, 2, 4 ... threads per rank. Variants:

horovodrun          no variable and no flag: each rank gets its share of the cores
torchrun            ``DistributedDataParallel`` on gloo, whose launcher sets ``OMP_NUM_THREADS=1``
no share            ``horovodrun --no-thread-share``: what it was before ranks got their share
N threads           ``horovodrun`` with all variables set to N by hand
elastic             ``horovodrun --min-np`` without any variable

Run it on a quiet machine: a job of another program takes processors from all variants, but not evenly."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from horoplug.base.thread_share import VARIABLES

NAMES = {name for each in VARIABLES for name in (each.name, *each.others)} | {"MKL_NUM_THREADS"}
WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "defaults_rank.py")
_JOB_SECONDS = 600.0  # limit for one job


class Variant(NamedTuple):
    """One way to start the ranks."""

    name: str
    launcher: Sequence[str]
    library: str = "horoplug"
    variables: Mapping[str, str] = {}


def variants(size: int, framework: str) -> Iterator[Variant]:
    run = [sys.executable, "-m", "horoplug.runner", "-np", str(size)]
    yield Variant("horovodrun", run)
    if framework == "torch":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        yield Variant("torchrun", torchrun, "ddp")
    yield Variant("no share", [*run, "--no-thread-share"])
    yield Variant("elastic", [*run, "--min-np", str(size)])
    threads, most = 1, max(len(os.sched_getaffinity(0)), 2)
    while threads <= most:
        yield Variant(
            f"{threads} thread{'s' if threads > 1 else ''}",
            run,
            variables=dict.fromkeys((each.name for each in VARIABLES), str(threads)),
        )
        threads *= 2


def rate(variant: Variant, framework: str, model: str, seconds: float) -> float:
    """Samples per second of all ranks of one job."""
    python = [] if "torch.distributed.run" in variant.launcher else [sys.executable]
    options = ["--library", variant.library, "--framework", framework, "--model", model]
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [*variant.launcher, *python, WORKER, *options, "--seconds", str(seconds)],
        env=env | dict(variant.variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_JOB_SECONDS,
    )
    marked = [line for line in done.stdout.splitlines() if "samples/s" in line]
    if done.returncode or not marked:
        raise SystemExit(f"{variant.name} failed:\n{done.stdout}{done.stderr}")
    return float(marked[0].rpartition("=")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-np", type=int, default=2, dest="size", help="number of ranks [2]")
    add("--framework", action="append", choices=("torch", "tensorflow", "jax"), help="[all]")
    add("--model", action="append", choices=("mlp", "cnn"), help="may be repeated [all]")
    add("--seconds", type=float, default=5.0, help="of training in each job [5]")
    add("--rounds", type=int, default=3, help="jobs of each variant [3]")
    args = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}")
    for framework in args.framework or ("torch", "tensorflow", "jax"):
        for model in args.model or ("mlp", "cnn"):
            measured: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                for variant in variants(args.size, framework):
                    found = rate(variant, framework, model, args.seconds)
                    measured.setdefault(variant.name, []).append(found)
            medians = {name: statistics.median(each) for name, each in measured.items()}
            best = max(value for name, value in medians.items() if "thread" in name)
            for name, value in medians.items():
                spread = (max(measured[name]) - min(measured[name])) / value
                print(
                    f"{framework:11}{model:5}{name:12}{value:9.0f} samples/s  ratio {value / best:.2f}  "
                    f"spread {spread:.0%}",
                    flush=True,
                )
    print(f"load average after: {os.getloadavg()[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
