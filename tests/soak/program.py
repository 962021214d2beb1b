"""Random episodes for the soak test: what one rank does in an episode, and the faults that it may cause.

All ranks draw the same program from the same seed, so that each knows what every operation must return. An episode has
streams: threads that each repeat a few step patterns, in process sets of their own or two in the same set. The ranks of
a stream use one framework, or each its own."""

import dataclasses
import random
import threading
from collections.abc import Sequence

import numpy as np

import horoplug as hvd
from tests.soak.frameworks import COMPILED, JOBS, WAYS, Request
from tests.soak.metrics import check_metrics
from tests.soak.streams import Left, Runner

# What a fault does to the victim. After the fatal ones all other ranks must get an error that names the victim.
FATAL = ("kill", "exit", "stop", "leave")
FAULTS = (*FATAL, "mismatch", "deadlock")
LONG_IDLE = 30.0
"""Seconds for which ranks rest before one of them is stopped: longer than it may take to name it after the limit, so
that idle time which counts is found."""


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    victim: int
    stream: int
    step: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """A thread. ``members``: global ranks of its process set, in ascending order; ``ways``: in which way each of them
    runs operations, a key of WAYS, or "training" on all."""

    number: int
    members: tuple[int, ...]
    seed: int
    steps: int
    ways: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Episode:
    seed: int
    streams: tuple[Stream, ...]
    fault: Fault | None = None
    joins: str = ""  # the way in which ranks reduce until they join; empty: they do not
    delays: float = 0.0  # seconds that a late rank sleeps at most
    idle: float = 0.0  # seconds for which a stream rests before one of its steps: that of the fault, if it has it
    metrics: bool = False  # whether the ranks average metrics at the end


def draw_episode(
    draw: random.Random, size: int, kind: str | None, frameworks: str = "numpy"
) -> Episode:
    """A random episode of ``size`` ranks with a fault of this kind. ``frameworks``: a key of JOBS."""
    count = 1 if kind == "deadlock" else draw.choice([1, 1, 2, 3])
    streams: list[Stream] = []
    for number in range(count):
        members: Sequence[int] = range(size)
        if streams and draw.random() < 0.3:
            members = streams[-1].members  # two threads submit in one set
        # All ranks rest before one is stopped. A rank that did not would wait in the last barrier, beyond its limit.
        elif (streams or kind != "stop") and draw.random() < 0.5:
            members = draw.sample(range(size), draw.randint(1, size))
        steps = draw.randint(1, 60 if frameworks in ("numpy", "torch") else 25)
        ways = _draw_ways(draw, len(members), JOBS[frameworks], streams)
        streams.append(Stream(number, tuple(sorted(members)), draw.randrange(2**31), steps, ways))
    fault = None
    if kind:
        stream = streams[0] if kind == "stop" else draw.choice(streams)
        fault = Fault(
            kind, draw.choice(stream.members), stream.number, draw.randrange(stream.steps)
        )
    joins = ""
    if kind is None and draw.random() < 0.3:
        joins = draw.choice([way for way in JOBS[frameworks] if way in WAYS])
    return Episode(
        seed=draw.randrange(2**31),
        streams=tuple(streams),
        fault=fault,
        joins=joins,
        delays=draw.choice([0, 0, 0.02]),
        idle=LONG_IDLE if kind == "stop" else draw.choice([0, 0, 0, 2.0]),
        metrics=kind is None and draw.random() < 0.3,
    )


def _draw_ways(
    draw: random.Random, size: int, ways: Sequence[str], streams: Sequence[Stream]
) -> tuple[str, ...]:
    """The ways of the ranks of a stream. Of an episode, one stream runs compiled programs."""
    if any(way in COMPILED for stream in streams for way in stream.ways):
        ways = [way for way in ways if way not in COMPILED]
    if draw.random() < 0.25:
        return tuple(draw.choice([way for way in ways if way in WAYS]) for _ in range(size))
    return (draw.choice(ways),) * size


def run_episode(episode: Episode) -> int:
    """Run this rank's part. Returns the number of operations whose results were checked. Errors: the first one of a
    stream, or AssertionError if a result is wrong."""
    rank = hvd.rank()
    sets = {tuple(range(hvd.size())): hvd.global_process_set}
    for stream in episode.streams:
        if stream.members not in sets:
            sets[stream.members] = hvd.add_process_set(list(stream.members))
    counts: list[int] = []
    errors: list[BaseException] = []

    def run(stream: Stream, process_set: hvd.ProcessSet) -> None:
        try:
            counts.append(Runner(episode, stream, process_set).run())
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, hvd.HorovodInternalError | Left):
                hvd.shutdown()  # otherwise the other ranks wait for this one, and the test for them

    mine = [(stream, sets[stream.members]) for stream in episode.streams if rank in stream.members]
    threads = [threading.Thread(target=run, args=arguments) for arguments in mine[1:]]
    for thread in threads:
        thread.start()
    if mine:
        run(*mine[0])
    for thread in threads:
        thread.join()
    for error in errors:
        if isinstance(error, AssertionError | Left):
            raise error
    if errors:
        raise errors[0]
    if episode.joins:
        counts.append(_join(episode))
    if episode.metrics:
        counts.append(check_metrics(random.Random(episode.seed + 2)))
    hvd.barrier()
    for some in sets.values():
        if some is not hvd.global_process_set:
            hvd.remove_process_set(some)
    return sum(counts)


def _join(episode: Episode) -> int:
    """Each rank reduces for a random number of steps, then joins."""
    draw = random.Random(episode.seed + 1)
    steps = [draw.randrange(8) for _ in range(hvd.size())]
    framework = WAYS[episode.joins]()
    for step in range(steps[hvd.rank()]):
        present = sum(each > step for each in steps)
        requests = [
            Request("allreduce", [np.ones(count)], {"op": hvd.Sum, "name": f"join.{name}"})
            for name, count in (("small", 3), ("large", 20_000))
        ]
        for finish in framework.start(requests, "join"):
            data = finish()
            assert (data == present).all(), (step, steps, data)
    last = int(framework.hvd.join())
    assert steps[last] == max(steps) or max(steps) == 0, (last, steps)
    return 2 * steps[hvd.rank()]
