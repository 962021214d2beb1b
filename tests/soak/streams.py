"""A stream of a soak test on one rank: the steps that a thread performs, and the faults that it causes in them."""

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import horoplug as hvd
from tests.soak.frameworks import COMPILED, WAYS, Finish, Framework, Request
from tests.soak.operations import OBJECTS, Caller, Operation, data, draw_pattern, same
from tests.soak.training import Training

if TYPE_CHECKING:
    from tests.soak.program import Episode, Stream


class Left(Exception):
    """The victim of the fault "leave" has shut down."""


class Runner:
    """A thread that repeats a few step patterns."""

    def __init__(self, episode: "Episode", stream: "Stream", process_set: hvd.ProcessSet) -> None:
        self._episode, self._stream = episode, stream
        self._size, self._rank = len(stream.members), stream.members.index(hvd.rank())
        even = any(way in COMPILED for way in stream.ways)
        self._caller = Caller(process_set, stream.members, self._rank, even)
        self._shared = random.Random(stream.seed)
        self._own = random.Random(stream.seed + 1 + self._rank)
        self._checked = 0
        fault = episode.fault
        is_here = fault is not None and fault.stream == stream.number
        self._idle_step = fault.step if fault is not None and is_here else stream.steps // 2
        way = stream.ways[self._rank]
        self._plain = WAYS["numpy"]()
        self._framework = WAYS["torch" if way == "training" else way]()
        self._trains = way == "training"

    def run(self) -> int:
        """Returns the number of operations whose results were checked."""
        if self._trains:
            self._train()
        else:
            self._run_patterns()
        return self._checked

    def _train(self) -> None:
        stream = self._stream
        training = Training(
            stream.number, self._caller.process_set, self._rank, self._size, stream.seed
        )
        for step in range(stream.steps):
            self._begin_step(step)
            self._checked += training.step()

    def _run_patterns(self) -> None:
        shared, number = self._shared, self._stream.number
        patterns = [
            draw_pattern(shared, number, self._size, n) for n in range(shared.randint(1, 3))
        ]
        pattern, window, shuffles = patterns[0], 1, False
        for step in range(self._stream.steps):
            if step == 0 or shared.random() < 0.1:  # otherwise the step is repeated
                pattern = shared.choice(patterns)
                window = shared.choice([1, 3, len(pattern)])
                shuffles = shared.random() < 0.3
            beside = shared.random() < 0.05
            self._begin_step(step)
            for start in range(0, len(pattern), window):
                self._perform(pattern[start : start + window], shuffles, step)
            if beside:
                self._perform(draw_pattern(shared, number, self._size, 9)[:1], False, step)

    def _begin_step(self, step: int) -> None:
        if step == self._idle_step:
            time.sleep(self._episode.idle)
        self._fault(step)
        if self._own.random() < 0.1:
            time.sleep(self._own.uniform(0, self._episode.delays))

    def _perform(self, operations: Sequence[Operation], shuffles: bool, step: int) -> None:
        errors: list[Exception] = []
        pending = self._start(operations, shuffles, step)
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

    def _start(
        self, operations: Sequence[Operation], shuffles: bool, step: int
    ) -> list[tuple[Operation, Callable[[], None]]]:
        """Start the operations that are not of objects. The functions in the result wait for them and check what they
        have returned.

        What the framework lacks is done with NumPy, and before operations that block."""
        cases = {
            each: self._caller.case(each, step)
            for each in operations
            if each.kind not in (*OBJECTS, "pair")
        }
        has = {each: self._framework.has(case.request.function) for each, case in cases.items()}
        others = [each for each in cases if not has[each]]
        mine = [each for each in cases if has[each]]
        if shuffles:
            self._own.shuffle(others)
            if self._framework.any_order:
                self._own.shuffle(mine)
        pending = [(each, self._pair(each, step)) for each in operations if each.kind == "pair"]

        def start(framework: Framework, chosen: list[Operation]) -> None:
            requests = [cases[each].request for each in chosen]
            key: Hashable = tuple(chosen)
            for each, finish in zip(chosen, framework.start(requests, key), strict=True):
                pending.append((each, _checking(cases[each].check, finish)))

        start(self._plain, others)
        start(self._framework, mine)
        return pending

    def _exchange_object(self, operation: Operation, step: int) -> None:
        """Every rank's object has a size of its own."""
        objects = [
            {"rank": rank, "data": data(rank, 1 + rank, operation, step)}
            for rank in range(self._size)
        ]
        mine, root = objects[self._rank], self._stream.members[operation.root]
        options = {"name": operation.name, "process_set": self._caller.process_set}
        if operation.kind == "object":
            found = [self._framework.hvd.broadcast_object(mine, root, **options)]
            objects = [objects[operation.root]]
        else:
            found = self._framework.hvd.allgather_object(mine, **options)
        assert [each["rank"] for each in found] == [each["rank"] for each in objects]
        for one, expected in zip(found, objects, strict=True):
            same(one["data"], expected["data"])

    def _pair(self, operation: Operation, step: int) -> Callable[[], None]:
        """The root sends to another rank of the set, or to itself."""
        members = self._stream.members
        framework = self._framework if self._framework.has("send_async") else self._plain
        finishes: list[Finish] = []
        sent = data(operation.root, self._size, operation, step)

        def start(function: str, array: np.ndarray, peer: int) -> None:
            options = {"name": operation.name, "process_set": self._caller.process_set}
            where = {"dest" if function == "send" else "source": members[peer]}
            request = Request(function, [array], options | where | {"tag": operation.tag})
            finishes.extend(framework.start([request], None))

        if self._rank == operation.root:
            start("send", sent.copy(), operation.dest)
        if self._rank == operation.dest:
            start("recv", np.zeros_like(sent), operation.root)

        def finish() -> None:
            results: list[Any] = []
            errors: list[Exception] = []
            for each in finishes:
                try:
                    results.append(each())
                except hvd.HorovodInternalError as error:
                    errors.append(error)
            if errors:
                raise errors[0]
            if self._rank == operation.dest:
                same(results[-1], sent)

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
                name = f"mismatch.{step}"
                self._fails(self._framework, name, np.ones(2 if is_victim else 3), name)
            case "deadlock" if self._size == hvd.size() > 1:
                # Graphs of TensorFlow that differ are a stall, which takes longer.
                name = "deadlock.x" if is_victim else "deadlock.y"
                self._fails(self._framework.eager, "deadlock", np.ones(2), name)

    def _fails(self, framework: Framework, text: str, array: np.ndarray, name: str) -> None:
        """The allreduce fails on this rank, with an error that contains the text."""
        options = {"name": name, "process_set": self._caller.process_set}
        request = Request("allreduce", [array], options)
        try:
            for finish in framework.start([request], ("fails", name, array.shape)):
                finish()
        except hvd.HorovodInternalError as error:
            if text in str(error):
                return
            raise
        raise AssertionError(f"no failure of {text}")


def _checking(check: Callable[[Any], None], finish: Finish) -> Callable[[], None]:
    return lambda: check(finish())
