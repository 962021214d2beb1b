"""A training loop whose ranks are busy with other things, too, which is never a failure, however long they take.

Each rank has an evaluation thread, which submits operations of its own at irregular times, and data-loader threads,
which never submit and compute much of the time. Rank 0 writes checkpoints between steps while all others wait."""

import dataclasses
import logging
import queue
import random
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np

import horoplug as hvd

_LIMIT = 300.0  # seconds for a thread to end


@dataclasses.dataclass(frozen=True)
class Load:
    """Durations in seconds. A checkpoint takes ``checkpoint``, of every ``checkpoint_steps`` steps one; an evaluation
    waits for at most ``evaluation`` before it submits. The training ends after ``seconds`` and two checkpoints."""

    seconds: float
    checkpoint: float
    evaluation: float
    checkpoint_steps: int = 20


@dataclasses.dataclass
class Result:
    """What one rank has done, and the warnings and errors that it has logged."""

    steps: int = 0
    checkpoints: int = 0
    evaluations: int = 0
    log: list[str] = dataclasses.field(default_factory=list)


def run(load: Load, seed: int) -> Result:
    """Run this rank's part. AssertionError: a result is wrong. The evaluation thread uses a process set without the
    last rank, or with two ranks the set of all."""
    ranks = range(hvd.size() - 1) if hvd.size() > 2 else range(2)
    process_set = hvd.add_process_set(list(ranks)) if hvd.size() > 2 else hvd.global_process_set
    result = Result()
    over = threading.Event()
    errors: list[BaseException] = []

    def evaluate() -> None:
        try:
            _evaluate(load, random.Random(seed + hvd.rank()), process_set, over, result)
        except BaseException as error:
            errors.append(error)

    handler = logging.Handler()
    handler.emit = lambda record: result.log.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("horoplug")
    logger.addHandler(handler)
    evaluation = threading.Thread(target=evaluate)
    try:
        if hvd.rank() in ranks:
            evaluation.start()
        with _Batches(seed) as batches:
            _train(load, batches, result, errors)
    except BaseException:
        hvd.shutdown()  # otherwise the other ranks wait for this one
        raise
    finally:
        over.set()
        if evaluation.ident:
            evaluation.join(_LIMIT)
        logger.removeHandler(handler)
    assert not evaluation.is_alive()
    if errors:
        raise errors[0]
    hvd.barrier()
    if process_set is not hvd.global_process_set:
        hvd.remove_process_set(process_set)
    return result


def _train(
    load: Load, batches: Iterator[np.ndarray], result: Result, errors: list[BaseException]
) -> None:
    end = time.monotonic() + load.seconds
    total = sum(range(1, hvd.size() + 1))
    while not errors:
        scale = next(batches)[0] * 0 + hvd.rank() + 1
        handles = [
            hvd.allreduce_async(np.full(1000 * (n + 1), scale), op=hvd.Sum, name=f"gradient.{n}")
            for n in range(6)
        ]
        for handle in handles:
            assert (hvd.synchronize(handle) == total).all()
        result.steps += 1
        # Whether the time of all ranks is over, so that all do the same steps.
        is_over = time.monotonic() > end and (hvd.rank() > 0 or result.checkpoints > 1)
        if hvd.allreduce(np.array([float(is_over)]), op=hvd.Min, name="time is over")[0]:
            return
        if result.steps % load.checkpoint_steps == 0 and hvd.rank() == 0:
            _write_checkpoint(load.checkpoint)
            result.checkpoints += 1


def _write_checkpoint(seconds: float) -> None:
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 20))
            file.flush()


def _evaluate(
    load: Load,
    draw: random.Random,
    process_set: hvd.ProcessSet,
    over: threading.Event,
    result: Result,
) -> None:
    size = process_set.size()
    assert size
    ended = 0.0
    while not ended:
        over.wait(draw.uniform(0, load.evaluation))
        mine = np.array([1.0, result.evaluations, float(over.is_set())])
        found = hvd.allreduce(mine, op=hvd.Sum, name="metrics", process_set=process_set)
        ended = found[2]
        assert list(found[:2]) == [size, size * result.evaluations], found
        rows = hvd.allgather(np.full((2, 3), process_set.rank()), "rows", process_set=process_set)
        assert (rows[:, 0] == np.repeat(np.arange(size), 2)).all()
        result.evaluations += 1


class _Batches:
    """Iterator over the batches that two data-loader threads prepare, one of them a daemon."""

    def __init__(self, seed: int) -> None:
        self._queue: queue.Queue[np.ndarray] = queue.Queue(2)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._load, args=(seed + n,), daemon=n == 0) for n in range(2)
        ]

    def __enter__(self) -> "_Batches":
        for thread in self._threads:
            thread.start()
        return self

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> np.ndarray:
        return self._queue.get(timeout=_LIMIT)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_LIMIT)
            assert not thread.is_alive()

    def _load(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not self._stop.is_set():
            batch = np.sort(draw.random(20_000))
            while not self._stop.is_set():
                try:
                    self._queue.put(batch, timeout=0.05)
                    break
                except queue.Full:
                    batch = np.sort(draw.random(20_000))  # busy, though nobody needs it
