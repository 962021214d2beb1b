"""Runs several benchmarks in succession and stores their results as JSON files.

    python benchmarks/suite.py short            a few minutes, beside gloo
    python benchmarks/suite.py full             every benchmark, beside every peer that is installed
    python benchmarks/suite.py full --only train --report FILE.md
    python benchmarks/suite.py full --resume    goes on where an earlier command for this checkout has ended

A benchmark whose peer is not installed is left out. The summary at the end names benchmarks that were left out or
failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness import mpi
from harness.checkout import identified

HERE = Path(__file__).resolve().parent
LIMIT = 3600.0  # seconds for one benchmark


class Part(NamedTuple):
    name: str  # of the JSON file
    program: str
    options: str

    def command(self, out: Path) -> list[str]:
        script = HERE / f"{self.program}.py"
        json = out / f"{self.name}.json"
        return [sys.executable, str(script), *self.options.split(), "--json", str(json)]


def peers(program: str, name: str, options: str) -> list[Part]:
    """The same benchmark beside each peer, in separate jobs: two MPIs cannot share a job, and MPI's ranks spin where
    gloo's sleep."""
    all_peers = ["torch-gloo", *(f"mpi4py:{mpi_name}" for mpi_name in mpi.KINDS), "horovod"]
    if program == "train":
        all_peers = ["torch-gloo", "horovod"]
    if program == "network":
        all_peers = ["torch-gloo", "mpi4py:mpich"]
    return [
        Part(f"{name}-{peer.replace(':', '-')}", program, f"{options} --peer {peer}")
        for peer in all_peers
    ]


IN_PYTORCH = "--peer horoplug-torch --peer torch-horoplug --peer torch-gloo"

TINY = [
    Part("allreduce", "allreduce", "-np 2 -b 8 -e 8K -f 32 -n 5 --peer torch-gloo"),
    Part("gradients", "gradients", "-np 2 --model 7x1KiB -n 2 --peer torch-gloo"),
    Part("train", "train", "-np 2 --model cnn --steps 2 --blocks 1 --peer torch-gloo"),
    Part("idle", "idle", "-np 2 --seconds 0.2 --peer torch-gloo"),
    Part("raw", "raw", "-b 8 -e 8 --turns 1 --seconds 0.01"),
    Part("control-plane", "control_plane", "--tensors 20 --factor 8 --bursts 2"),
    Part("torch-hooks", "torch_hooks", "-np 2 --parameters 20 --iterations 3"),
    Part("frameworks", "frameworks", "-np 2 --model 7x1KiB -n 2"),
    Part("start", "start", "--ranks 2 --rounds 1 --store 8"),
    Part("launch", "launch", "--rounds 1"),
    Part("commit", "commit", "--model 7x1KiB -n 5"),
    Part("loops", "loops", "-np 2 --tensors 8 --rounds 1 --blocks 1"),
    Part("calls", "calls", "-np 1 --blocks 1 --repeats 40"),
    Part("ddp", "ddp", "-np 2 -b 1K -e 16K -f 16 -n 5 --peer torch-horoplug --peer torch-gloo"),
    Part("c10d", "allreduce", f"-np 2 -b 8 -e 8K -f 32 -n 5 {IN_PYTORCH}"),
    Part(
        "elastic",
        "elastic",
        "--ranks 3 --rounds 1 --state 10K --ways rollback=False --only recovery,admission",
    ),
    Part(
        "elastic-2",
        "elastic",
        "--ranks 2 --blocks 1 --steps 3 --state 10K --ways rollback=False --only step",
    ),
]

SHORT = [
    Part("allreduce", "allreduce", "-np 2 -b 8 -e 64M -f 4 --peer torch-gloo"),
    Part(
        "gradients",
        "gradients",
        "-np 2 --model resnet50 --model 200x1KiB -n 30 --peer torch-gloo",
    ),
    Part("train", "train", "-np 2 --peer torch-gloo"),
    Part("idle", "idle", "-np 2 --peer torch-gloo"),
    Part("control-plane", "control_plane", "--factor 4"),
]

OTHER_OPERATIONS = "allgather", "broadcast", "reducescatter", "alltoall", "barrier", "sendrecv"

FULL = [
    Part("raw-2", "raw", "--ranks 2"),
    # Some peers take 10 ms and more for each of these.
    Part("raw-4", "raw", "--ranks 4 -b 16 -e 16M -f 16 --turns 3 --seconds 0.05 --timeout 20"),
    *peers("allreduce", "allreduce-2", "-np 2 -b 4 -e 256M -f 4"),
    *peers("allreduce", "allreduce-4", "-np 4 -b 4 -e 64M -f 4 -n 100"),
    # More ranks than cores: there must be no cliff.
    *peers("allreduce", "allreduce-8", "-np 8 -b 4 -e 1M -f 16 -n 100"),
    *peers("allreduce", "allreduce-16", "-np 16 -b 4 -e 1M -f 16 -n 100"),
    *(
        part
        for ranks in (2, 4)
        for name in OTHER_OPERATIONS
        for part in peers(
            "allreduce",
            f"{name}-{ranks}",
            f"-np {ranks} --collective {name} -b 4 -e 64M -f 16{' -n 100' if ranks > 2 else ''}",
        )
    ),
    Part("c10d-2", "allreduce", f"-np 2 -b 4 -e 256M -f 4 {IN_PYTORCH}"),
    Part("ddp-2", "ddp", "-np 2 --peer torch-horoplug --peer torch-gloo"),
    *peers("gradients", "gradients-2", "-np 2 --model resnet50 --model 200x1KiB -n 50"),
    *peers("gradients", "gradients-bert-2", "-np 2 --model bert-large -n 5"),
    *peers("train", "train-2", "-np 2 --steps 120"),
    Part("train-compiled-2", "train", "-np 2 --compile --peer torch-horoplug --peer torch-gloo"),
    *peers("idle", "idle-2", "-np 2"),
    *peers("network", "network", "-b 4 -e 64M -f 4"),
    *peers("network", "network-unshaped", "--rate 0 -b 4 -e 64M -f 4"),
    Part(
        "network-unshaped-bare-tcp",
        "network",
        "--hosts 2 --rate 0 -b 4 -e 64M -f 4 --peer torch-gloo --peer bare-tcp",
    ),
    Part("control-plane-1", "control_plane", "--bursts 1"),
    Part("control-plane-10", "control_plane", "--bursts 10"),
    Part("torch-hooks", "torch_hooks", "-np 2"),
    Part("frameworks", "frameworks", "-np 2 -n 100"),
    Part("start", "start", "--ranks 16,64,128,256 --store 1024,4096"),
    Part("launch-2", "launch", "--rounds 9"),
    Part("launch-4", "launch", "--ranks 4 --rounds 9"),
    Part("commit", "commit", "--model resnet50 --model bert-large -n 30"),
    Part("loops", "loops", "-np 2"),
    Part("calls-1", "calls", "-np 1"),
    Part("calls-2", "calls", "-np 2"),
    Part("elastic", "elastic", ""),
    Part("elastic-2", "elastic", "--ranks 2 --only step"),
    Part(
        "elastic-large",
        "elastic",
        "--state 100M --rounds 3 --only recovery,admission --ways rollback=False,rollback=True",
    ),
]

SUITES = {"tiny": TINY, "short": SHORT, "full": FULL}


def missing(part: Part) -> str:
    """A requirement of the part that this machine lacks; empty if the part can run."""
    words = part.options.split()
    for at in (at for at, word in enumerate(words) if word == "--peer"):
        kind, _, which = words[at + 1].partition(":")
        module = "torch" if "torch" in kind else {"bare-tcp": "numpy"}.get(kind, kind)
        if importlib.util.find_spec(module) is None:
            return module
        if which and mpi.find(which) is None:
            return which
    return ""


def run(part: Part, out: Path) -> str:
    """Run the part. Returns the error; empty if it succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{part.name}.json").unlink(missing_ok=True)
    try:
        status = subprocess.run(part.command(out), timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {LIMIT:.0f} s"
    return f"ended with status {status}" if status else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=HERE.parent / "build" / "bench",
        help="folder for the JSON files [build/bench]",
    )
    add(
        "--resume",
        action="store_true",
        help="keep what was measured of this checkout, in a folder in --out that is named after its commit",
    )
    add("--only", default="", metavar="TEXT", help="run the benchmarks with TEXT in their name")
    add("--report", type=Path, metavar="FILE", help="write a page with all records in --out")
    args = parser.parse_args()
    remarks, failed = [], False
    if args.resume:
        args.out /= identified(HERE.parent).name
    for part in SUITES[args.suite]:
        if args.only not in part.name:
            continue
        absent = missing(part)
        if absent:
            remarks.append(f"{part.name}: left out, {absent} is not installed")
            continue
        if args.resume and (args.out / f"{part.name}.json").exists():
            remarks.append(f"{part.name}: was measured before")
            continue
        print(f"\n== {part.name}: {part.program}.py {part.options}", flush=True)
        begin = time.monotonic()
        problem = run(part, args.out)
        failed |= bool(problem)
        remarks.append(f"{part.name}: {problem or 'done'}, {time.monotonic() - begin:.0f} s")
    print("", *remarks, f"JSON files: {args.out}", sep="\n", flush=True)
    if args.report:
        command = [sys.executable, HERE / "report.py", args.out, "-o", args.report]
        failed |= subprocess.run(list(map(str, command))).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
