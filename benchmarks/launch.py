"""Import, init and launch beside torchrun and mpirun: the time until a small job has ended.

    python benchmarks/launch.py --ranks 2 --rounds 7

Every job does the same in each rank: it imports its library, joins the job, waits in one barrier, and ends. The ways
to start it take turns for ``--rounds`` rounds. ``time`` is the median of whole jobs, launcher included; ``ratio`` is
the time of the way named in ``peer`` over it, as the median of the ratios within a round, so more than 1 means faster
than the peer. ``spread`` is the interquartile range of these ratios.

numpy             horovodrun; import horoplug
torch             horovodrun; import horoplug.torch
torchrun          torchrun; torch.distributed on gloo
torchrun-horoplug torchrun; torch.distributed on horoplug
openmpi, mpich    that mpirun; import mpi4py
openmpi-numpy ... that mpirun; import horoplug
import ...        the import alone, without a job
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness import mpi, whole_job
from harness.job import LAUNCH, command_line, options_of
from harness.record import Column, Plot, Record

ABOUT = """Whole jobs that import a library, start, wait in one barrier and end: launchers and libraries take turns."""

COLUMNS = {
    "ranks": Column("ranks", width=6),
    "way": Column("way", width=20),
    "seconds": Column("time", "s", ".2f", 8),
    "processor": Column("processor", "s", ".2f", 10),
    "peer": Column("peer", width=20),
    "ratio": Column("ratio", "x", ".2f", 7),
    "spread": Column("spread", "x", ".2f", 7),
}
LIMIT = 300.0  # seconds for one job

NUMPY = "import horoplug as hvd; hvd.init(); hvd.barrier(); hvd.shutdown()"
TORCH = NUMPY.replace("horoplug", "horoplug.torch")
MPI4PY = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"
DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group("{}")
dist.barrier()
dist.destroy_process_group()
"""
TORCHRUN = "import sys; from torch.distributed.run import main; sys.exit(main())"


class Way(NamedTuple):
    """A way to start the job, and the one that it is compared with."""

    name: str
    command: list[str]
    peer: str = ""
    environment: Mapping[str, str] = {}


def ways(ranks: int, folder: str) -> Iterator[Way]:
    def program(name: str, text: str) -> str:
        file = os.path.join(folder, f"{name}.py")
        with open(file, "w") as stream:
            stream.write(text)
        return file

    python = sys.executable
    horovodrun = [python, "-c", LAUNCH, "-np", str(ranks), python]
    torchrun = [python, "-c", TORCHRUN, "--standalone", f"--nproc-per-node={ranks}"]
    numpy, torch = program("numpy_job", NUMPY), program("torch_job", TORCH)
    yield Way("import numpy", [python, "-c", "import numpy"])
    yield Way("import horoplug", [python, "-c", "import horoplug.numpy"], "import numpy")
    yield Way("import torch", [python, "-c", "import torch, torch.distributed"])
    yield Way("import horoplug.torch", [python, "-c", "import horoplug.torch"], "import torch")
    yield Way("torchrun", [*torchrun, program("gloo_job", DISTRIBUTED.format("gloo"))])
    own = program("horoplug_job", DISTRIBUTED.format("horoplug"))
    yield Way("torchrun-horoplug", [*torchrun, own], "torchrun")
    yield Way("torch", [*horovodrun, torch], "torchrun")
    for name in mpi.installed():
        found = mpi.find(name)
        assert found is not None
        mpirun = [str(found.mpirun), "-np", str(ranks), python]
        job = program("mpi_job", MPI4PY)
        yield Way(name, [*mpirun, job], environment=found.environment())
        yield Way(f"{name}-numpy", [*mpirun, numpy], name, found.environment())
    yield Way("numpy", [*horovodrun, numpy], next(iter(mpi.installed()), "torchrun"))


def measure(record: Record, ranks: int, rounds: int, environment: Mapping[str, str]) -> None:
    def cost(way: Way) -> whole_job.Cost:
        return whole_job.run(way.command, {**environment, **way.environment}, LIMIT)

    with tempfile.TemporaryDirectory() as folder:
        all_ways = list(ways(ranks, folder))
        for way in all_ways:
            cost(way)  # fills the cache of compiled bytecode
        found: dict[str, list[whole_job.Cost]] = {way.name: [] for way in all_ways}
        for _ in range(rounds):
            for way in all_ways:
                found[way.name].append(cost(way))
    for way in all_ways:
        seconds, processor = zip(*found[way.name], strict=True)
        ratios = []
        if way.peer:
            pairs = zip(found[way.peer], found[way.name], strict=True)
            ratios = [peer.seconds / own.seconds for peer, own in pairs]
        quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else []
        record.row(
            ranks=ranks,
            way=way.name,
            seconds=statistics.median(seconds),
            processor=statistics.median(processor),
            peer=way.peer,
            ratio=statistics.median(ratios) if ratios else None,
            spread=quarters[2] - quarters[0] if quarters else None,
        )


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each job [2]")
    parser.add_argument("--rounds", type=int, default=7, help="jobs of each way [7]")
    args = parser.parse_args()
    record = Record(
        "launch",
        "import, init and launch",
        ABOUT,
        COLUMNS,
        [Plot("bars", "ranks", "seconds", "way")],
        ranks=1,
        options=options_of(args),
    )
    with whole_job.cached_bytecode() as environment:
        measure(record, args.ranks, args.rounds, environment)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
