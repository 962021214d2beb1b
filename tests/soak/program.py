"""Random programs for the soak test: what one rank does in an episode, and the faults that it may cause.

All ranks draw the same program from the same seed, so that each knows what every operation must return. An episode has
streams: threads that each repeat a few step patterns, in process sets of their own or two in the same set."""

import dataclasses
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import horoplug as hvd
from tests.harness.adasum_reference import adasum

# What a fault does to the victim. After the fatal ones all other ranks must get an error that names the victim.
FATAL = ("kill", "exit", "stop", "leave")
FAULTS = (*FATAL, "mismatch", "deadlock")

KINDS = (
    "sum",
    "min",
    "average",
    "group",
    "gather all",
    "broadcast",
    "exchange",
    "scatter reduced",
    "reduce",
    "gather",
    "scatter",
    "pair",
    "adasum",
    "object",
    "objects",
)
OBJECTS = ("object", "objects")  # these block, so that all ranks perform them in one order
COUNTS = (1, 3, 100, 5000)
LARGE = 40_000


class Left(Exception):
    """The victim of the fault "leave" has shut down."""


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    victim: int
    stream: int
    step: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """A thread. ``members``: global ranks of its process set, in ascending order."""

    number: int
    members: tuple[int, ...]
    seed: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Episode:
    seed: int
    streams: tuple[Stream, ...]
    fault: Fault | None = None
    joins: bool = False
    delays: float = 0.0  # seconds that a late rank sleeps at most


def draw_episode(draw: random.Random, size: int, kind: str | None) -> Episode:
    """A random episode of ``size`` ranks with a fault of this kind."""
    count = 1 if kind == "deadlock" else draw.choice([1, 1, 2, 3])
    streams: list[Stream] = []
    for number in range(count):
        members: Sequence[int] = range(size)
        if streams and draw.random() < 0.3:
            members = streams[-1].members  # two threads submit in one set
        elif draw.random() < 0.5:
            members = draw.sample(range(size), draw.randint(1, size))
        steps = draw.randint(1, 60)
        streams.append(Stream(number, tuple(sorted(members)), draw.randrange(2**31), steps))
    fault = None
    if kind:
        stream = draw.choice(streams)
        fault = Fault(
            kind, draw.choice(stream.members), stream.number, draw.randrange(stream.steps)
        )
    joins = kind is None and draw.random() < 0.3
    return Episode(draw.randrange(2**31), tuple(streams), fault, joins, draw.choice([0, 0, 0.02]))


@dataclasses.dataclass(frozen=True)
class _Operation:
    name: str
    kind: str
    dtype: str
    count: int  # columns
    root: int  # rank in the set
    dest: int  # rank in the set that receives of a pair
    tag: int  # of a pair


def _draw_pattern(draw: random.Random, stream: Stream, number: int) -> list[_Operation]:
    size = len(stream.members)
    kinds = [kind for kind in KINDS if kind != "adasum" or size & (size - 1) == 0]

    def operation(n: int) -> _Operation:
        kind = draw.choice(kinds)
        return _Operation(
            f"s{stream.number}.p{number if draw.random() < 0.5 else 'x'}.{n}",
            kind,
            draw.choice(["f4", "f8"] if kind == "adasum" else ["f4", "f8", "i4", "i8", "u1"]),
            LARGE if draw.random() < 0.02 else draw.choice(COUNTS),
            draw.randrange(size),
            draw.randrange(size),
            10_000 * stream.number + 100 * number + n,
        )

    return [operation(n) for n in range(draw.choice([1, 2, 5, 12]))]


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
            counts.append(_Runner(episode, stream, process_set).run())
        except BaseException as error:
            errors.append(error)
            if isinstance(error, AssertionError):
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
    hvd.barrier()
    for some in sets.values():
        if some is not hvd.global_process_set:
            hvd.remove_process_set(some)
    return sum(counts)


def _join(episode: Episode) -> int:
    """Each rank reduces for a random number of steps, then joins."""
    draw = random.Random(episode.seed + 1)
    steps = [draw.randrange(8) for _ in range(hvd.size())]
    for step in range(steps[hvd.rank()]):
        present = sum(each > step for each in steps)
        for name, count in ("small", 3), ("large", 20_000):
            data = hvd.allreduce(np.ones(count), op=hvd.Sum, name=f"join.{name}")
            assert (data == present).all(), (name, step, steps, data)
    last = hvd.join()
    assert steps[last] == max(steps) or max(steps) == 0, (last, steps)
    return 2 * steps[hvd.rank()]


class _Runner:
    """One stream on one rank."""

    def __init__(self, episode: Episode, stream: Stream, process_set: hvd.ProcessSet) -> None:
        self._episode, self._stream, self._set = episode, stream, process_set
        self._rank = stream.members.index(hvd.rank())
        self._size = len(stream.members)
        self._shared = random.Random(stream.seed)
        self._own = random.Random(stream.seed + 1 + self._rank)
        self._checked = 0

    def run(self) -> int:
        shared = self._shared
        patterns = [_draw_pattern(shared, self._stream, n) for n in range(shared.randint(1, 3))]
        pattern, window, shuffles = patterns[0], 1, False
        for step in range(self._stream.steps):
            if step == 0 or shared.random() < 0.1:  # otherwise the step is repeated
                pattern = shared.choice(patterns)
                window = shared.choice([1, 3, len(pattern)])
                shuffles = shared.random() < 0.3
            beside = shared.random() < 0.05
            self._fault(step)
            if self._own.random() < 0.1:
                time.sleep(self._own.uniform(0, self._episode.delays))
            for start in range(0, len(pattern), window):
                self._perform(pattern[start : start + window], shuffles, step)
            if beside:
                self._perform(_draw_pattern(shared, self._stream, 9)[:1], False, step)
        return self._checked

    def _perform(self, operations: Sequence[_Operation], shuffles: bool, step: int) -> None:
        order = [each for each in operations if each.kind not in OBJECTS]
        if shuffles:
            self._own.shuffle(order)
        errors: list[Exception] = []
        pending = []
        for operation in order:
            try:
                pending.append((operation, self._submit(operation, step)))
            except hvd.HorovodInternalError as error:
                errors.append(error)
        if shuffles:
            self._own.shuffle(pending)
        for each in operations:
            if each.kind in OBJECTS:
                pending.append((each, functools.partial(self._exchange_object, each, step)))
        for operation, finish in pending:
            # Also after an error, since names of operations in flight cannot be used again.
            try:
                finish()
                self._checked += 1
            except AssertionError as error:
                where = f"{self._stream}, rank {self._rank}, step {step}: {operation}"
                errors.insert(0, AssertionError(f"{where}: {error}"))
            except hvd.HorovodInternalError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _data(self, rank: int, rows: int, operation: _Operation, step: int) -> np.ndarray:
        """At most 13 + 2 * rank, so that sums of eight ranks fit into one byte."""
        values = np.arange(rows * operation.count) % 7 + 2 * rank + step % 7
        return values.reshape(rows, operation.count).astype(operation.dtype)

    def _submit(self, operation: _Operation, step: int) -> Callable[[], None]:
        """Submit the operation; the result waits for it and checks what it has returned."""
        size, rank, root = self._size, self._rank, operation.root
        every = [self._data(r, size, operation, step) for r in range(size)]
        mine = every[rank].copy()
        arguments: dict[str, Any] = {"name": operation.name, "process_set": self._set}
        total = np.sum(every, axis=0, dtype="f8")

        def check(
            handle: int, expected: Any, part: Callable[[Any], Any] = lambda x: x
        ) -> Callable[[], None]:
            def finish() -> None:
                _same(part(hvd.synchronize(handle)), np.asarray(expected).astype(operation.dtype))

            return finish

        match operation.kind:
            case "sum":
                return check(hvd.allreduce_async_(mine, op=hvd.Sum, **arguments), total)
            case "min":
                return check(hvd.allreduce_async(mine, op=hvd.Min, **arguments), every[0])
            case "average":
                handle = hvd.allreduce_async(mine, op=hvd.Average, **arguments)
                return check(handle, total / size if "f" in operation.dtype else total // size)
            case "adasum":
                return check(hvd.allreduce_async(mine, op=hvd.Adasum, **arguments), adasum(every))
            case "group":
                tensors = [mine, mine[:1], mine[0, :1]]
                handle = hvd.grouped_allreduce_async(tensors, op=hvd.Max, **arguments)
                return check(handle, every[-1][:1], lambda parts: parts[1])
            case "gather all":  # some ranks have no rows
                rows = [data[: (r + step) % size] for r, data in enumerate(every)]
                handle = hvd.allgather_async(rows[rank].copy(), **arguments)
                return check(handle, np.concatenate(rows))
            case "broadcast":
                handle = hvd.broadcast_async(mine, self._stream.members[root], **arguments)
                return check(handle, every[root])
            case "exchange":
                expected = [data[rank] for data in every]
                return check(hvd.alltoall_async(mine, **arguments), expected, lambda both: both[0])
            case "scatter reduced":
                handle = hvd.reducescatter_async(mine, op=hvd.Sum, **arguments)
                return check(handle, total[rank : rank + 1])
            case "reduce":
                handle = hvd.reduce_async(mine, self._stream.members[root], op=hvd.Sum, **arguments)
                return check(handle, total if rank == root else every[rank])
            case "gather":
                handle = hvd.gather_async(mine[:1], self._stream.members[root], **arguments)
                expected = np.concatenate([data[:1] for data in every])
                return check(handle, expected if rank == root else expected[:0])
            case "scatter":
                handle = hvd.scatter_async(mine, self._stream.members[root], **arguments)
                return check(handle, every[root][rank : rank + 1])
        return self._pair(operation, every, arguments)

    def _exchange_object(self, operation: _Operation, step: int) -> None:
        """Every rank's object has a size of its own."""
        objects = [
            {"rank": rank, "data": self._data(rank, 1 + rank, operation, step)}
            for rank in range(self._size)
        ]
        root, mine = operation.root, objects[self._rank]
        if operation.kind == "object":
            found = [
                hvd.broadcast_object(
                    mine, self._stream.members[root], operation.name, process_set=self._set
                )
            ]
            objects = [objects[root]]
        else:
            found = hvd.allgather_object(mine, operation.name, process_set=self._set)
        assert [each["rank"] for each in found] == [each["rank"] for each in objects]
        for one, expected in zip(found, objects, strict=True):
            _same(one["data"], expected["data"])

    def _pair(
        self, operation: _Operation, every: list[np.ndarray], arguments: dict[str, Any]
    ) -> Callable[[], None]:
        """The root sends to another rank of the set."""
        peers = self._stream.members
        handles: list[int] = []
        errors: list[Exception] = []
        received = np.zeros_like(every[0])

        def submit(function: Callable[..., int], data: np.ndarray, peer: int) -> None:
            try:
                handles.append(function(data, peers[peer], operation.tag, **arguments))
            except hvd.HorovodInternalError as error:
                errors.append(error)

        if self._rank == operation.root:
            submit(hvd.send_async, every[self._rank].copy(), operation.dest)
        if self._rank == operation.dest:
            submit(hvd.recv_async, received, operation.root)

        def finish() -> None:
            for handle in handles:
                try:
                    hvd.synchronize(handle)
                except hvd.HorovodInternalError as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            if self._rank == operation.dest:
                _same(received, every[operation.root])

        return finish

    def _fault(self, step: int) -> None:
        fault = self._episode.fault
        if fault is None or (fault.stream, fault.step) != (self._stream.number, step):
            return
        is_victim = hvd.rank() == fault.victim
        match fault.kind:
            case "kill" if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit" if is_victim:
                os._exit(3)
            case "stop" if is_victim:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "leave" if is_victim:
                hvd.shutdown()
                raise Left
            case "mismatch" if self._size > 1:
                data, name = np.ones(2 if is_victim else 3), f"mismatch.{step}"
                _fails(name, data, name=name, process_set=self._set)
            case "deadlock" if self._size == hvd.size() > 1:
                _fails("deadlock", np.ones(2), name="deadlock.x" if is_victim else "deadlock.y")


def _fails(text: str, data: np.ndarray, **arguments: Any) -> None:
    """The allreduce fails on this rank, with an error that contains the text."""
    try:
        hvd.allreduce(data, **arguments)
    except hvd.HorovodInternalError as error:
        if text in str(error):
            return
        raise
    raise AssertionError(f"no failure of {text}")


def _same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)
