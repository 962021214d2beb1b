"""Elastic jobs when a process dies, and what they cost while none does, beside torchft.

    python benchmarks/elastic.py
    python benchmarks/elastic.py --state 100M --rounds 3 --only recovery,admission

recovery    from the SIGKILL of one of the processes, in its forward pass while the others wait for its gradients, to
            the end of the next committed step of the last survivor
admission   the pause of the survivors when the replacement is taken in: the longest interval between the ends of steps,
            of the five before and after, minus the median one
step        a training step without failures, with a commit after each

rollback=False, rollback=True   horovodrun --min-np, and hvd.elastic.TorchState with this argument
plain       horovodrun without --min-np, and no commits; only for ``step``
torchft     a replica group for each process, over gloo on TCP, with an asynchronous quorum and HTTP for the state

Model and optimizer (Adam) have ``--state`` bytes, the batch has four samples, and PyTorch one thread per process. For
recovery and admission each way has a job per round, by turns, and another process dies in each round. For ``step`` the
jobs of all ways exist together and run blocks of steps by turns, in another order each time; a step's time is that of a
block on its slowest process, over its steps. ``median``, ``least`` and ``most`` are over the rounds or blocks.
``ratio`` is the median of the ratios within a round or turn, to the first way in the table.

horovodrun starts a replacement at once. That of torchft is started by the benchmark after the recovery, and so does not
slow it. torchft's time limits are as short as is sensible on a busy machine: see TIMEOUTS. Without torchft (make
torchft) its rows are left out. Horovod is not among the ways: it cannot be compiled for current PyTorch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from harness.elastic_rank import End, Task, Timeouts
from harness.job import LAUNCH, command_line, options_of
from harness.record import Column, Plot, Record

from horoplug.bench.cases import byte_count

HERE = Path(__file__).resolve().parent
TORCHFT = HERE.parent / "build" / "torchft"
LIMIT = 120.0  # seconds for all that a job does between two messages

WAYS = ("rollback=False", "rollback=True", "torchft")
MEASURES = ("recovery", "admission", "step")
AT = 50  # committed steps before the failure

# Survivors whose neighbour has died have an error at once, and ask the lighthouse for a quorum. It waits for missing
# processes for join_timeout_ms, or until it has had no heartbeat of theirs for heartbeat_timeout_ms, which must be
# several intervals on a busy machine. Other survivors wait until the first ones leave, or for the time of an operation.
# A join_timeout_ms shorter than a step leaves late processes out again and again: too short for --state 100M.
TIMEOUTS = Timeouts(
    join_timeout_ms=100,
    quorum_tick_ms=10,
    heartbeat_timeout_ms=500,
    heartbeat_interval=100,
    operation=2000,
)
# Without failures, a late process must not be left behind.
PATIENT = TIMEOUTS._replace(join_timeout_ms=60_000, heartbeat_timeout_ms=5000, operation=60_000)

ABOUT = f"""Elastic jobs on one machine. Recovery: from the SIGKILL of a process to the end of the next committed step
of the last survivor. Admission: the longest interval between two steps of the survivors when a replacement is taken in,
minus the median one. Step: a training step and a commit without failures; plain is horovodrun without --min-np and
without commits. Ratios are to the first way of the same measure. torchft: ProcessGroupGloo, {TIMEOUTS}. Horovod cannot
be compiled for current PyTorch."""

COLUMNS = {
    "measure": Column("measure", width=10),
    "way": Column("way", width=15),
    "ranks": Column("ranks", "", "d", 6),
    "state": Column("state", "MB", ".1f"),
    "median": Column("median", "ms", ".3f", 10),
    "least": Column("least", "ms", ".3f", 10),
    "most": Column("most", "ms", ".3f", 10),
    "ratio": Column("ratio", "first", ".3f", 7),
}

# Prints the address, and serves until its stdin ends.
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas={least}, join_timeout_ms={t.join_timeout_ms},
                          quorum_tick_ms={t.quorum_tick_ms}, heartbeat_timeout_ms={t.heartbeat_timeout_ms})
print(server.address().rsplit(":", 1)[1], flush=True)
sys.stdin.read()
server.shutdown()
"""


def environment(way: str) -> dict[str, str]:
    """The environment of the processes of a way; only those of torchft find it and what it needs."""
    path = [os.environ.get("PYTHONPATH", "")]
    if way == "torchft":
        path.insert(0, str(TORCHFT))
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    found.setdefault("RUST_LOG", "warn")  # torchft writes several lines in each step otherwise
    return found


def has_torchft() -> bool:
    """Whether torchft can be imported."""
    command = [sys.executable, "-c", "import torchft"]
    done = subprocess.run(command, env=environment("torchft"), capture_output=True, timeout=LIMIT)
    return done.returncode == 0


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Job:
    """The processes of one way, and the connections to those that train."""

    def __init__(self, way: str, ranks: int, state_bytes: int, victim: int | None = None) -> None:
        """``victim``: the number of the process that dies."""
        self.way = way
        self.gates: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(Path(self._folder.name) / "gate")
        self._listener.bind(address)
        self._listener.listen(64)
        self._listener.settimeout(LIMIT)
        timeouts = PATIENT if victim is None else TIMEOUTS
        self._task = Task(address, way, state_bytes, ranks, victim, AT, timeouts=timeouts)
        try:
            if way == "torchft":
                self._task = self._task._replace(lighthouse=self._start_lighthouse())
                for process in range(ranks):
                    self.start_replica(process)
            else:
                elastic = [] if way == "plain" else ["--min-np", "2"]
                launcher = ["-c", LAUNCH, "-np", str(ranks), *elastic, sys.executable]
                self._start([*launcher, *self._program(0)])
            self.accept(ranks)
        except BaseException:
            self.close()
            raise

    def start_replica(self, process: int) -> None:
        """Start a process of torchft."""
        self._start(self._program(process))

    def accept(self, processes: int) -> None:
        """Wait until as many more processes are connected. Errors: RuntimeError."""
        for _ in range(processes):
            try:
                channel, _ = self._listener.accept()
            except TimeoutError:
                raise self.error("a process did not start") from None
            self.gates.append(Connection(channel.detach()))

    def accept_waiting(self) -> None:
        """Accept the processes that are there."""
        self._listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.accept(1)
        self._listener.settimeout(LIMIT)

    def error(self, what: str) -> RuntimeError:
        tail = self._log.read_text(errors="replace")[-3000:]
        return RuntimeError(f"{self.way}: {what}\n{tail}")

    def close(self) -> None:
        """End all processes that are left."""
        for gate in self.gates:
            gate.close()
        self._listener.close()
        for process in reversed(self._processes):
            if process.stdin:
                process.stdin.close()
            if self.way == "torchft":  # horovodrun, instead, has to end its ranks
                process.kill()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()
                process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _program(self, process: int) -> list[str]:
        task = json.dumps(self._task._replace(process=process)._asdict())
        return [str(HERE / "harness" / "elastic_rank.py"), task]

    def _start(self, arguments: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **pipes}
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, env=environment(self.way), **files)
        self._processes.append(process)
        return process

    def _start_lighthouse(self) -> str:
        """Returns its address. Without failures, it begins with all processes."""
        least = self._task.ranks if self._task.victim is None else 2
        program = LIGHTHOUSE.format(least=least, t=Timeouts(*self._task.timeouts))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = self._start(["-c", program], **pipes)
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        if not port:
            raise self.error("the lighthouse did not start")
        return f"http://127.0.0.1:{port}"


# ---- a failure -------------------------------------------------------------------------------------------------------


def fail_once(way: str, ranks: int, state_bytes: int, victim: int) -> tuple[float, float]:
    """Seconds of recovery and admission in one job."""
    with Job(way, ranks, state_bytes, victim) as job:
        killed, recovered = 0.0, 0
        every: list[list[End]] = []
        deadline = time.monotonic() + LIMIT
        # The replacement, too: it ends with the others.
        while len(every) < ranks:
            job.accept_waiting()
            ready = wait(job.gates, 0.1)
            if time.monotonic() > deadline:
                raise job.error("the job did not recover in time")
            for gate in ready:
                assert isinstance(gate, Connection)
                try:
                    kind, value = gate.recv()
                except (EOFError, ConnectionResetError):
                    job.gates.remove(gate)
                    continue
                if kind == "killed":
                    killed = value
                elif kind == "ends":
                    every.append([End(*end) for end in value])
                else:
                    recovered += 1
            if recovered == ranks - 1:
                recovered = 0
                if way == "torchft":
                    job.start_replica(ranks)
        for gate in job.gates:
            gate.send(None)
        # The replacement has no step before the failure.
        survivors = [ends for ends in every if ends[0][0] <= AT]
        recovery = max(next(at for step, at, _ in ends if step > AT) for ends in survivors)
        return recovery - killed, max(pause(ends, ranks) for ends in survivors)


def pause(ends: list[End], ranks: int) -> float:
    """The longest interval around the admission minus the median one. ``ends``: of one survivor's steps."""
    committed = [end for before, end in itertools.pairwise(ends) if end[0] > before[0]]
    intervals = np.diff([at for _, at, _ in committed])
    shrunk = next(i for i, (_, _, size) in enumerate(committed) if size < ranks)
    grown = next(i for i, end in enumerate(committed) if i > shrunk and end[2] == ranks)
    around = intervals[max(shrunk + 1, grown - 6) : grown + 5]
    return float(around.max() - np.median(intervals))


def measure_failures(record: Record, args: Any, ways: list[str]) -> None:
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(args.rounds):
        for way in ways:
            victim = (args.ranks - 1 - turn) % args.ranks
            found[way].append(fail_once(way, args.ranks, args.state, victim))
    for index, measure in enumerate(MEASURES[:2]):
        if measure in args.only:
            seconds = {way: [each[index] for each in rounds] for way, rounds in found.items()}
            rows(record, measure, seconds, args)


# ---- steps without a failure -----------------------------------------------------------------------------------------


def block(job: Job, steps: int) -> float:
    """Seconds of a step, on the slowest process, in a block of as many."""
    seconds: list[float] = []
    try:
        for gate in job.gates:
            gate.send(steps)
        for gate in job.gates:
            if not gate.poll(LIMIT):
                raise job.error("a block of steps took too long")
            seconds.append(gate.recv()[1] / steps)
    except (EOFError, OSError):
        raise job.error("a process has ended") from None
    return max(seconds)


@contextlib.contextmanager
def jobs(args: Any, ways: list[str]) -> Iterator[dict[str, Job]]:
    with contextlib.ExitStack() as stack:
        yield {way: stack.enter_context(Job(way, args.ranks, args.state)) for way in ways}


def measure_steps(record: Record, args: Any, ways: list[str]) -> None:
    ways = ["plain", *ways]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with jobs(args, ways) as found:
        for job in found.values():
            block(job, args.steps)  # warms up
        for turn in range(args.blocks):
            for index in range(len(ways)):
                way = ways[(turn + index) % len(ways)]
                seconds[way].append(block(found[way], args.steps))
        for job in found.values():
            for gate in job.gates:
                gate.send(0)
    rows(record, "step", seconds, args)


# ---- all -------------------------------------------------------------------------------------------------------------


def rows(record: Record, measure: str, seconds: dict[str, list[float]], args: Any) -> None:
    """A row for each way. ``seconds``: by way, in the order of the rounds."""
    first = next(iter(seconds.values()))
    for way, each in seconds.items():
        record.row(
            measure=measure,
            way=way,
            ranks=args.ranks,
            state=args.state / 1e6,
            median=1e3 * statistics.median(each),
            least=1e3 * min(each),
            most=1e3 * max(each),
            ratio=statistics.median(a / b for a, b in zip(each, first, strict=True)),
        )


def names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(known):
            raise ValueError
        return found

    return parse


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes of each job [4]")
    add("--state", type=byte_count, default=10**6, help="bytes of model and optimizer [1000000]")
    add("--rounds", type=int, default=5, help="jobs of each way for recovery and admission [5]")
    add("--blocks", type=int, default=40, help="blocks of each way for step [40]")
    add("--steps", type=int, default=100, help="steps of a block [100]")
    add("--only", type=names(MEASURES), default=list(MEASURES), help=",".join(MEASURES))
    add("--ways", type=names(WAYS), default=list(WAYS), help=",".join(WAYS))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the jobs first
    ways = [way for way in args.ways if way != "torchft" or has_torchft()]
    record = Record(
        "elastic",
        f"elastic jobs, {args.ranks} ranks, state of {args.state / 1e6:g} MB",
        ABOUT,
        COLUMNS,
        [Plot("bars", "measure", "median", "way")],
        ranks=1,
        options=options_of(args),
    )
    if "torchft" in args.ways and "torchft" not in ways:
        record.note("torchft cannot be imported (make torchft), and is left out")
    if set(args.only) & {"recovery", "admission"}:
        measure_failures(record, args, ways)
    if "step" in args.only:
        measure_steps(record, args, ways)
    return record.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
