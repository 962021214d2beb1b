"""Batches of operations: one call of the core submits them all, and one call waits for them.

Batches are for in-place operations that recur under the same names, such as the reductions of gradients. The core keeps
the properties that do not change from one submission to the next (``Prepared``), so that an operation costs little time
in Python.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from horoplug._native import Engine, Error, Prepared
from horoplug.common.context import context
from horoplug.common.in_flight import InFlight, Waitable
from horoplug.common.ops import CPU, Tensor
from horoplug.common.opspec import Call, OpSpec
from horoplug.common.status import exception


def prepare(
    spec: OpSpec, call: Call, code: int, shape: Sequence[int], device: int = CPU
) -> Prepared:
    """An operation on a tensor of the dtype with this code, for :class:`Batch`. ``call`` must have a name."""
    name = spec.wire_name(call.name)
    assert name is not None
    return Prepared(
        spec.code,
        code,
        shape,
        name,
        reduce_op=call.reduce_op,
        prescale=call.prescale,
        postscale=call.postscale,
        process_set=call.process_set,
        wire_dtype=call.wire_dtype,
        device=device,
    )


class Batch(InFlight):
    """Several in-place operations, each on one dense tensor. Keeps the tensors alive until the core is done with
    them."""

    __slots__ = (
        "complete",
        "engine",
        "failures",
        "handles",
        "numbers",
        "ready",
        "refused",
        "stream",
        "tensors",
    )

    def __init__(
        self,
        prepared: Sequence[Prepared],
        addresses: Sequence[int],
        tensors: Sequence[Tensor],
        stream: Callable[[], int] | None = None,
    ) -> None:
        """Submit the operations in order, up to the first one that the core refuses. ``refused`` is then the exception
        to raise. ``numbers`` has the users' handles of the submitted operations.

        The tensors are in host memory, or all on one GPU. For a GPU, ``stream`` returns the stream (CUstream) that the
        caller uses. Raises NotInitializedError before ``init``."""
        self.engine: Engine = context.engine()
        self.tensors = tensors
        self.stream = stream
        self.ready = 0 if stream is None else stream()  # the stream in which the tensors are ready
        self.handles: list[int] = []  # the core's
        self.complete = True  # no member was waited for individually
        self.failures: dict[int, Exception] = {}  # by index, of the members that `wait` saw fail
        # From here on the context holds the tensors, so an interrupt cannot free them.
        numbers = context.track_batch(self, len(tensors))
        self.handles, error = self.engine.submit_batch(prepared, addresses, self.ready)
        count = len(self.handles)
        context.drop(numbers[count:])
        self.numbers, self.tensors = numbers[:count], tensors[:count]
        self.refused = None if error is None else exception(error)

    def wait(self) -> Exception | None:
        """Block until all members are done; return the exception of the first one that failed, or None. Members that
        were waited for individually are skipped.

        Raises HorovodInternalError if the job was shut down and another one was begun. After a KeyboardInterrupt the
        members can be waited for again."""
        numbers, handles = self.numbers, self.handles
        if not numbers:
            return None
        context.find(numbers[0])  # raises
        left: Sequence[int] = range(len(numbers))
        if not self.complete:
            left = [index for index, n in enumerate(numbers) if n in context.operations]
            numbers, handles = [numbers[i] for i in left], [handles[i] for i in left]
        try:
            failures = self.engine.wait_batch(handles)
            if self.stream is not None:
                failed = {index for index, _ in failures}
                self.order([handle for index, handle in enumerate(handles) if index not in failed])
                self._abandon([handles[index] for index in failed])
        except Error as error:  # in a forked child, to which the engine does not belong
            return exception(error)
        self.complete = False
        context.waited()
        context.drop(numbers)
        self.engine.release_batch(handles)
        self.failures = {left[index]: exception(error) for index, error in failures}
        return next(iter(self.failures.values()), None)

    def order(self, handles: Sequence[int]) -> None:
        """Make the caller's streams wait for these operations, which are done and on a GPU."""
        assert self.stream is not None
        for stream in {self.stream(), self.ready}:
            self.engine.stream_wait_batch(handles, stream)

    def abandon(self) -> None:
        self._abandon(self.handles)

    def _abandon(self, handles: Sequence[int]) -> None:
        if self.stream is not None:
            for handle in handles:
                with contextlib.suppress(Error):
                    self.engine.stream_wait(handle, self.ready)

    def waitable(self, handle: int) -> "BatchMember":
        return BatchMember(self, handle)


class BatchMember(Waitable):
    """One operation of a batch."""

    __slots__ = ("batch", "handle", "index", "number")

    def __init__(self, batch: Batch, number: int) -> None:
        self.batch = batch
        self.number = number  # the user's handle
        self.index = number - batch.numbers[0]
        self.handle = batch.handles[self.index]  # the core's

    def done(self) -> bool:
        done = self.batch.engine.poll(self.handle)
        if done:
            context.waited()
        return done

    def wait(self) -> Any:
        """Block until done; return the tensor."""
        try:
            self.batch.engine.wait(self.handle)
            if self.batch.stream is not None:
                self.batch.order([self.handle])
        except Error as error:
            self.abandon()
            self._forget()
            raise exception(error) from None
        self._forget()
        return self.batch.tensors[self.index]

    def abandon(self) -> None:
        self.batch._abandon([self.handle])

    def _forget(self) -> None:
        context.waited()
        if context.operations.pop(self.number, None) is not None:
            self.batch.complete = False
            self.batch.engine.release(self.handle)
