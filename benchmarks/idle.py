"""The cost of a job without work: processor time and wake-ups.

    python benchmarks/idle.py -np 2 --peer torch-gloo --peer mpi4py

idle        the library is initialised and has run an operation, and the program makes no calls
straggler   rank 0 submits a small allreduce late, while the other ranks wait for it

Both are measured for some seconds on every rank; the table has the largest value of any rank. ``processor`` is
processor time of the whole process over elapsed time, in percent of a core. ``wake-ups`` are those of horoplug's
progress thread by its own count. ``switches`` are the voluntary and nonvoluntary context switches in /proc of all
threads of the process except the main thread. No other library is initialised while the idle horoplug is measured. The
straggler is measured with one library after the other, in one job.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.job import command_line, job, open_peer, options_of, parse
from harness.peers import PEERS, Peer
from harness.record import Column, Plot, Record

from horoplug.bench.cases import Case, Run

ABOUT = """A job without work: initialised and idle, and ranks that wait for a late rank. Processor time of the process,
wake-ups of horoplug's progress thread, and context switches of all threads except the main thread, per second; the
largest value of any rank."""

COLUMNS = {
    "situation": Column("situation", width=10),
    "library": Column("library", width=14),
    "seconds": Column("time", "s", ".2f", 7),
    "processor": Column("processor", "%", ".4f", 10),
    "wakeups": Column("wake-ups", "1/s", ".2f", 9),
    "switches": Column("switches", "1/s", ".2f", 9),
}

MARGIN = (
    0.2  # seconds before and after a measurement, so that ranks that measure do not wake the others
)
LATE = Case("allreduce", np.dtype(np.float32), "sum", 16)


def clocks() -> tuple[float, float]:
    """Elapsed seconds, and seconds of processor time of this process."""
    return time.perf_counter(), time.process_time()


def counts() -> tuple[float, float]:
    """Wake-ups of the engine, and context switches of all threads except the main thread, so far."""
    from horoplug.common.context import context

    main = threading.main_thread().native_id
    switches = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != main:
            status = (task / "status").read_text().splitlines()
            switches += sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)
    return context.engine().stats()["wakeups"], switches


def watched(hvd: Any, run: Run, *, matters: bool = True) -> dict[str, float]:
    """The cost of a run of some seconds: the largest values of the ranks whose ``matters`` is true."""
    hvd.barrier()
    time.sleep(MARGIN)
    # Counting takes milliseconds, so it is outside of the timed interval.
    begin = (*counts(), *clocks())
    run()
    end_clocks = clocks()
    end = (*counts(), *end_clocks)
    time.sleep(MARGIN)
    wakeups, switches, seconds, processor = (b - a for a, b in zip(begin, end, strict=True))
    rates = np.array([processor * 100, wakeups, switches]) / seconds * matters
    most = hvd.allreduce(np.array([seconds, *rates]), op=hvd.Max, name="idle.most")
    return dict(zip(("seconds", "processor", "wakeups", "switches"), most.tolist(), strict=True))


def straggle(hvd: Any, library: Peer, seconds: float) -> dict[str, float]:
    """Every rank except rank 0 waits in an allreduce for this number of seconds."""
    prepared = library.prepare(LATE)
    prepared.x[:] = 0
    prepared.run()  # creates connections and memory
    late = hvd.rank() == 0

    def wait() -> None:
        if late:
            time.sleep(seconds)
        prepared.run()

    return watched(hvd, wait, matters=not late)


def main() -> int:
    parser = command_line(__doc__, tuple(PEERS))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each situation [5]")
    args = parse(parser)
    with job(args, peers=False) as (own, _):
        hvd = own.hvd
        record = Record(
            "idle",
            f"idle, {hvd.size()} ranks on {hvd.cross_size()} host(s)",
            ABOUT,
            COLUMNS,
            [Plot("bars", "situation", "processor", "library")],
            ranks=hvd.size(),
            options=options_of(args),
            speaks=hvd.rank() == 0,
        )
        own.prepare(LATE).run()
        idle = watched(hvd, lambda: time.sleep(args.seconds))
        record.row(situation="idle", library=own.name, **idle)
        if hvd.size() > 1:
            waited = straggle(hvd, own, args.seconds)
            record.row(situation="straggler", library=own.name, **waited)
            for name in args.peer:
                peer = open_peer(name, hvd)
                record.version(peer)
                waited = straggle(hvd, peer, args.seconds)
                record.row(situation="straggler", library=name, **{**waited, "wakeups": None})
                peer.close()
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
