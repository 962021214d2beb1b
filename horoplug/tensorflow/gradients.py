"""Gradients of the operations: one rule for each, registered for the operation on one tensor and on a group.

The rules are Horovod's. They take the ranks' losses to be averaged, as the optimizer does: the gradient of an operation
whose result every rank uses is the *average* of what the ranks send back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.opspec import Call
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum
from horoplug.tensorflow.nodes import rank_in, run, size_of


class Forward:
    """What a gradient needs to know of the operation that it belongs to."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.process_set: int = op.get_attr("process_set_id")

    def tensors(self, outputs: Sequence[Any]) -> list[tf.Tensor]:
        """The gradients of the outputs that correspond to the inputs, dense."""
        return [tf.convert_to_tensor(grad) for grad in outputs[: self.count]]

    @property
    def count(self) -> int:
        """The number of tensors: one, or that of the group."""
        return self.op.get_attr("num_tensors") if self.is_grouped else 1

    @property
    def is_grouped(self) -> bool:
        return "Grouped" in self.op.type

    def number(self, name: str) -> float:
        return float(self.op.get_attr(name))

    def again(self, operation: str, tensors: Sequence[tf.Tensor], **options: Any) -> Any:
        """Run an operation on the gradients, with other options."""
        # Of an operation in a graph this is empty, and the node's name is used.
        called = self.op.get_attr("tensor_name").decode()
        if not called and not tf.executing_eagerly():
            called = self.op.outputs[0].op.name.rpartition("/")[2]
        name = f"{called}.gradient" if called else None
        call = Call(name, process_set=self.process_set, **options)
        return run(operation, tensors, call, grouped=self.is_grouped)

    def average(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return as_list(self.again("allreduce", grads, reduce_op=Average))


def as_list(result: Any) -> list[tf.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _allreduce(past: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    op = past.op.get_attr("reduce_op")
    if op not in (Average, Sum, Adasum):
        raise NotImplementedError(
            f"allreduce with op={NAMES[op]} has no gradient; use tf.stop_gradient on its input."
        )
    options = {
        "prescale": past.number("prescale_factor"),
        "postscale": past.number("postscale_factor"),
        "wire_dtype": past.op.get_attr("wire_dtype"),
    }
    return as_list(past.again("allreduce", grads, reduce_op=op, **options))


def _allgather(past: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """This rank's rows of the average."""
    rank = rank_in(past.process_set)
    inputs, rows = past.op.inputs, past.op.outputs[past.count :]
    return [
        tf.reshape(_rows(grad, counts, rank, tensor), tf.shape(tensor))
        for grad, counts, tensor in zip(past.average(grads), rows, inputs, strict=True)
    ]


def _rows(grad: tf.Tensor, counts: tf.Tensor, rank: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """A rank's rows, which are those of `tensor`. XLA wants to know how many these are; where they begin, it need not
    know."""
    size = tf.concat([[1], tf.shape(tensor)], 0)[-tf.rank(grad) :]
    first = tf.gather(tf.cumsum(tf.cast(counts, tf.int32), exclusive=True), rank)
    return tf.slice(grad, tf.concat([[first], tf.zeros_like(size)[1:]], 0), size)


def _broadcast(past: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """Only the root's tensor had an effect."""
    is_root = tf.equal(rank_in(0), past.op.get_attr("root_rank"))
    return [tf.where(is_root, grad, tf.zeros_like(grad)) for grad in past.average(grads)]


def _alltoall(past: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """Every row goes back where it came from; rows that were sent nowhere had no effect."""
    returned, _ = past.again("alltoall", grads, splits=past.op.outputs[1])
    missing = tf.shape(past.op.inputs[0])[:1] - tf.shape(returned)[:1]
    shape = tf.concat([missing, tf.shape(returned)[1:]], 0)
    return [tf.concat([returned, tf.zeros(shape, returned.dtype)], 0), None]


def _reducescatter(past: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """All rows of the gradient; times the ranks for Sum, as if each rank's loss were the sum of theirs."""
    gathered = as_list(past.again("allgather", grads)[0])
    factor = tf.constant(
        past.number("prescale_factor") * past.number("postscale_factor"), tf.float64
    )
    if past.op.get_attr("reduce_op") == Sum:
        factor *= tf.cast(size_of(past.process_set), tf.float64)
    return [grad * tf.cast(factor, grad.dtype) for grad in gathered]


Rule = Callable[[Forward, Sequence[tf.Tensor]], Sequence[Any]]

# By the name of the operation: from the gradients of its outputs to those of its inputs.
RULES: dict[str, Rule] = {
    "Allreduce": _allreduce,
    "GroupedAllreduce": _allreduce,
    "Allgather": _allgather,
    "GroupedAllgather": _allgather,
    "Broadcast": _broadcast,
    "Alltoall": _alltoall,
    "Reducescatter": _reducescatter,
    "GroupedReducescatter": _reducescatter,
}


def differentiate(op: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradients of an operation's inputs."""
    past = Forward(op)
    return list(RULES[op.type.removeprefix("Horovod")](past, past.tensors(grads)))


for _name in RULES:
    tf.RegisterGradient(f"Horovod{_name}")(lambda op, *grads: differentiate(op, grads))
_NUMBERS = ("Size", "LocalSize", "Rank", "LocalRank", "ProcessSetIncluded", "Defers")
for _name in ("Join", "Barrier", *_NUMBERS):
    tf.no_gradient(f"Horovod{_name}")
