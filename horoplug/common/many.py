"""Many operations at once: submitted with one call of the core, and waited for with one.

It is for operations in place that recur under their names, such as the reductions of gradients. What stays the same
from one time to the next is handed to the core once (``Prepared``); then an operation costs Python next to nothing.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from horoplug._native import Engine, Error, Prepared
from horoplug.common.context import Several, context
from horoplug.common.ops import CPU, Tensor
from horoplug.common.opspec import Call, OpSpec
from horoplug.common.status import exception


def prepare(
    spec: OpSpec, call: Call, code: int, shape: Sequence[int], device: int = CPU
) -> Prepared:
    """An operation on a tensor of dtype ``code``, for :class:`Batch`. ``call`` has a name."""
    name = f"{spec.name}.{call.name}"
    options = call.reduce_op, call.prescale, call.postscale, call.process_set, call.wire_dtype
    return Prepared(spec.code, code, shape, name, *options, device)


class Batch(Several):
    """Operations on one dense tensor each, which their results overwrite. It keeps the tensors alive until the core is
    done with them."""

    __slots__ = ("engine", "handles", "numbers", "ready", "refused", "stream", "tensors", "whole")

    def __init__(
        self,
        prepared: Sequence[Prepared],
        addresses: Sequence[int],
        tensors: Sequence[Tensor],
        stream: Callable[[], int] | None = None,
    ) -> None:
        """Submit them, up to the first one that is refused: ``refused`` is then the reason.

        The tensors are in the host's memory, or all on one card: ``stream`` then says which of its streams (CUstream)
        the caller uses. ``numbers``: the handles of those that were submitted. Raises NotInitializedError."""
        self.engine: Engine = context.engine()
        self.tensors = tensors
        self.stream = stream
        self.ready = 0 if stream is None else stream()  # the stream that the tensors are ready in
        self.handles: list[int] = []
        self.whole = True  # none was waited for
        # From here on the context holds the tensors, whatever interrupts.
        numbers = context.track_several(self, len(tensors))
        self.handles, error = self.engine.submit_many(prepared, addresses, self.ready)
        count = len(self.handles)
        context.drop(numbers[count:])
        self.numbers, self.tensors = numbers[:count], tensors[:count]
        self.refused = None if error is None else exception(error)

    def wait(self) -> Exception | None:
        """Block until all are done; what is wrong with the first that failed. Those that were waited for already are
        left alone.

        Raises HorovodInternalError if the job was shut down and another one begun. After a KeyboardInterrupt they can
        be waited for again."""
        numbers, handles = self.numbers, self.handles
        if not numbers:
            return None
        context.find(numbers[0])  # raises
        if not self.whole:
            left = [place for place, n in enumerate(numbers) if n in context.operations]
            numbers, handles = [numbers[i] for i in left], [handles[i] for i in left]
        try:
            failures = self.engine.wait_many(handles)
            if self.stream is not None:
                failed = {place for place, _ in failures}
                self.order([handle for n, handle in enumerate(handles) if n not in failed])
                self._let_go([handles[place] for place in failed])
        except Error as error:  # this is not the process that has submitted them
            return exception(error)
        self.whole = False
        context.waited()
        context.drop(numbers)
        self.engine.release_many(handles)
        return exception(failures[0][1]) if failures else None

    def order(self, handles: Sequence[int]) -> None:
        """What the caller puts into its streams from now on comes after these operations, which are done."""
        assert self.stream is not None
        for stream in {self.stream(), self.ready}:
            self.engine.stream_wait_many(handles, stream)

    def let_go(self) -> None:
        self._let_go(self.handles)

    def _let_go(self, handles: Sequence[int]) -> None:
        if self.stream is not None:
            for handle in handles:
                with contextlib.suppress(Error):
                    self.engine.stream_wait(handle, self.ready)

    def member(self, number: int) -> "Member":
        return Member(self, number)


class Member:
    """One operation of a batch."""

    def __init__(self, batch: Batch, number: int) -> None:
        self.batch = batch
        self.number = number
        self.place = number - batch.numbers[0]

    def done(self) -> bool:
        done = self.batch.engine.poll(self.batch.handles[self.place])
        if done:
            context.waited()
        return done

    def wait(self) -> Any:
        """Block until done; return the tensor. Raises the exception that belongs to the failure."""
        handle = self.batch.handles[self.place]
        try:
            self.batch.engine.wait(handle)
            if self.batch.stream is not None:
                self.batch.order([handle])
        except Error as error:
            self.let_go()
            self._forget()
            raise exception(error) from None
        self._forget()
        return self.batch.tensors[self.place]

    def let_go(self) -> None:
        self.batch._let_go([self.batch.handles[self.place]])

    def _forget(self) -> None:
        context.waited()
        if context.operations.pop(self.number, None) is not None:
            self.batch.whole = False
            self.batch.engine.release(self.batch.handles[self.place])
