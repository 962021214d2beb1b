"""Gradients of the operations: one autograd function for all of them, and one rule for each in :data:`GRADIENTS`.

The rules are Horovod's. They assume that the losses of the ranks are averaged, as the optimizer does: the gradient of
an operation whose result every rank uses is the *average* of the gradients of all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horoplug.common.context import context
from horoplug.common.ops import Adapter, submit
from horoplug.common.opspec import BY_NAME, Call, OpSpec, Output
from horoplug.common.process_sets import ProcessSet, process_set_by_id
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum


@dataclass(frozen=True)
class Forward:
    """The data of an operation that its gradient needs, for its tensors that have gradients."""

    adapter: Adapter
    spec: OpSpec
    call: Call
    shapes: list[torch.Size]
    row_counts: list[list[int]]

    def again(self, name: str, tensors: Sequence[torch.Tensor], **changes: Any) -> Any:
        """Run operation ``name`` on the gradients, with the options of this operation except for ``changes``."""
        called = self.call.name
        call = self.call._replace(name=called and f"{called}.gradient", **changes)
        return self.adapter.run(BY_NAME[name], tensors, call, BY_NAME[name].grouped)

    @property
    def process_set(self) -> ProcessSet:
        """The process set of the operation."""
        return process_set_by_id(self.call.process_set)

    def average(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The average of the gradients of all ranks in the process set."""
        averages: list[torch.Tensor] = self.again("allreduce", grads, reduce_op=Average, root=0)
        return averages


class Collective(torch.autograd.Function):
    """Any out-of-place operation, on one tensor or on a group."""

    @staticmethod
    def forward(
        ctx: Any, adapter: Adapter, spec: OpSpec, call: Call, grouped: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        operation = submit(adapter, spec, tensors, call, grouped, blocking=True)
        result = operation.wait()
        # Integers and bool have no gradients.
        kept = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
        rows = [operation.row_counts[i] for i in kept] if spec.output is Output.ROWS else []
        ctx.kept, ctx.count = kept, len(tensors)
        ctx.past = Forward(adapter, spec, call, [tensors[i].shape for i in kept], rows)
        if spec.received_splits:
            ctx.mark_non_differentiable(result[1])
            return tuple(result)
        return tuple(result) if grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs: list[torch.Tensor | None] = [None] * ctx.count
        found = GRADIENTS[ctx.past.spec.name](ctx.past, [grads[i] for i in ctx.kept])
        for i, grad in zip(ctx.kept, found, strict=True):
            inputs[i] = grad
        return None, None, None, None, *inputs

    @classmethod
    def run(
        cls,
        adapter: Adapter,
        spec: OpSpec,
        tensors: Sequence[torch.Tensor],
        call: Call,
        grouped: bool,
    ) -> Any:
        """Apply the function; returns what ``Operation.wait`` returns."""
        apply: Any = cls.apply  # has no type
        results = apply(adapter, spec, call, grouped, *tensors)
        if grouped:
            return list(results)
        return results if spec.received_splits else results[0]


def _allreduce(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if past.call.reduce_op not in (Average, Sum, Adasum):
        raise RuntimeError(
            f"allreduce with op={NAMES[past.call.reduce_op]} has no gradient; detach its input"
        )
    reduced: list[torch.Tensor] = past.again("allreduce", grads)
    return reduced


def _allgather(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """This rank's rows of the average of the gradients."""
    rank = past.process_set.rank()
    assert rank is not None
    return [
        grad.narrow(0, sum(rows[:rank]), rows[rank]).reshape(shape)
        for grad, rows, shape in zip(past.average(grads), past.row_counts, past.shapes, strict=True)
    ]


def _broadcast(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The average on the root; zeros on other ranks, whose tensors were not used."""
    average = past.average(grads)
    if context.connections().rank == past.call.root:
        return average
    # Depends on the average, so that all ranks run its gradient; 0 * g would be NaN where g is infinite or NaN.
    return [torch.where(torch.zeros_like(g, dtype=torch.bool), g, 0) for g in average]


def _alltoall(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The gradient of each row from the rank that received it; zeros for rows that were not sent."""
    returned, _ = past.again("alltoall", grads, splits=past.row_counts[0])
    missing = past.shapes[0][0] - len(returned)
    if missing:
        returned = torch.cat([returned, returned.new_zeros(missing, *returned.shape[1:])])
    return [returned]


def _reducescatter(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The gradients of all rows; for Sum multiplied by the number of ranks, as if the loss were the sum over ranks."""
    call = past.call
    factor = call.prescale * call.postscale
    if call.reduce_op == Sum:
        factor *= past.process_set.size() or 1
    gathered = past.again("allgather", grads, reduce_op=Average, prescale=1.0, postscale=1.0)
    return [grad * factor for grad in gathered]


def _reduce(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The gradient of the root's output, on every rank; the outputs of other ranks do not contain the result."""
    call = past.call
    if call.reduce_op not in (Average, Sum):
        raise RuntimeError(
            f"reduce with op={NAMES[call.reduce_op]} has no gradient; detach its input"
        )
    factor = call.prescale * call.postscale
    if call.reduce_op == Average:
        factor /= past.process_set.size() or 1
    grad = past.again("broadcast", grads, reduce_op=Average, prescale=1.0, postscale=1.0)
    return [grad * factor]


def _gather(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The rows of the root's gradient that belong to this rank's input."""
    returned = past.again("scatter", grads, splits=past.row_counts[0] or None)
    return [returned.reshape(past.shapes[0])]


def _scatter(past: Forward, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The root gets the gradients of all ranks, and zeros for rows that were not sent. Other ranks get zeros."""
    gathered = past.again("gather", grads, splits=None)
    missing = past.shapes[0][0] - len(gathered)
    if missing:
        gathered = torch.cat([gathered, gathered.new_zeros(missing, *gathered.shape[1:])])
    return [gathered]


Rule = Callable[[Forward, Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# By the name of the operation: a function of the gradients of its outputs that returns those of its inputs.
GRADIENTS: dict[str, Rule] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
}
