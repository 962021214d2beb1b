"""Many operations at once: submitted with one call of the core, and waited for with one.

It is for operations in place that recur under their names, such as the reductions of gradients. What stays the same
from one time to the next is handed to the core once (``Prepared``); then an operation costs Python next to nothing.
"""

from collections.abc import Sequence
from typing import Any

from horoplug._native import Engine, Error, Prepared
from horoplug.common.context import Several, context
from horoplug.common.ops import Tensor
from horoplug.common.opspec import Call, OpSpec
from horoplug.common.status import exception


def prepare(spec: OpSpec, call: Call, code: int, shape: Sequence[int]) -> Prepared:
    """An operation on a tensor of dtype ``code``, for :class:`Batch`. ``call`` has a name."""
    name = f"{spec.name}.{call.name}"
    options = call.reduce_op, call.prescale, call.postscale, call.process_set
    return Prepared(spec.code, code, shape, name, *options)


class Batch(Several):
    """Operations on one dense tensor each, which their results overwrite. It keeps the tensors alive until the core is
    done with them."""

    __slots__ = ("engine", "handles", "numbers", "refused", "tensors", "whole")

    def __init__(
        self, prepared: Sequence[Prepared], addresses: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        """Submit them, up to the first one that is refused: ``refused`` is then the reason.

        ``numbers``: the handles of those that were submitted. Raises NotInitializedError."""
        self.engine: Engine = context.engine()
        self.tensors = tensors
        self.handles: list[int] = []
        self.whole = True  # none was waited for
        # From here on the context holds the tensors, whatever interrupts.
        numbers = context.track_several(self, len(tensors))
        self.handles, error = self.engine.submit_many(prepared, addresses)
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
        except Error as error:  # this is not the process that has submitted them
            return exception(error)
        self.whole = False
        context.waited()
        context.drop(numbers)
        self.engine.release_many(handles)
        return exception(failures[0][1]) if failures else None

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
        try:
            self.batch.engine.wait(self.batch.handles[self.place])
        except Error as error:
            self._forget()
            raise exception(error) from None
        self._forget()
        return self.batch.tensors[self.place]

    def _forget(self) -> None:
        context.waited()
        if context.operations.pop(self.number, None) is not None:
            self.batch.whole = False
            self.batch.engine.release(self.batch.handles[self.place])
