"""The gradients of the operations. Each rule serves an operation on one tensor and on a group of tensors.

The rules are Horovod's. They assume that the ranks' losses are averaged, as the optimizer does: for an operation whose
result every rank uses, the gradient is the *average* of the gradients of all ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.opspec import Call
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum
from horoplug.tensorflow import xla
from horoplug.tensorflow.operations import rank_in, run, size_of


class Forward:
    """The operation of the forward pass whose gradient is computed."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.process_set: int = op.get_attr("process_set_id")

    def dense(self, grads: Sequence[Any]) -> list[tf.Tensor]:
        """The gradients of the outputs that correspond to the inputs, as dense tensors."""
        return [tf.convert_to_tensor(grad) for grad in grads[: self.count]]

    @property
    def count(self) -> int:
        """Number of tensors: one, or the size of the group."""
        return self.op.get_attr("num_tensors") if self.is_grouped else 1

    @property
    def is_grouped(self) -> bool:
        """Whether the operation runs on a group of tensors."""
        return "Grouped" in self.op.type

    def number(self, name: str) -> float:
        """A numeric attribute that is stored as text."""
        return float(self.op.get_attr(name))

    def run(self, operation: str, grads: Sequence[tf.Tensor], **options: Any) -> Any:
        """Run an operation on the gradients, in the same process set."""
        # Without tensor_name, the ranks match an operation of a graph by the name of its node.
        name = self.op.get_attr("tensor_name").decode()
        if not name and not tf.executing_eagerly():
            name = self.op.outputs[0].op.name.rpartition("/")[2]
        name = f"{name}.gradient" if name else None
        call = Call(name, process_set=self.process_set, **options)
        return run(operation, grads, call, grouped=self.is_grouped)

    def average(self, grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The average of the gradients of all ranks in the process set."""
        return as_list(self.run("allreduce", grads, reduce_op=Average))


def as_list(result: Any) -> list[tf.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _allreduce(forward: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    op = forward.op.get_attr("reduce_op")
    if op not in (Average, Sum, Adasum):
        raise NotImplementedError(
            f"allreduce with op={NAMES[op]} has no gradient; use tf.stop_gradient on its input"
        )
    options = {
        "prescale": forward.number("prescale_factor"),
        "postscale": forward.number("postscale_factor"),
        "wire_dtype": forward.op.get_attr("wire_dtype"),
    }
    return as_list(forward.run("allreduce", grads, reduce_op=op, **options))


def _allgather(forward: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """This rank's rows of the average."""
    rank = rank_in(forward.process_set)
    inputs, rows = forward.op.inputs, forward.op.outputs[forward.count :]
    return [
        tf.reshape(_rows_of_rank(grad, counts, rank, tensor), tf.shape(tensor))
        for grad, counts, tensor in zip(forward.average(grads), rows, inputs, strict=True)
    ]


def _rows_of_rank(
    grad: tf.Tensor, counts: tf.Tensor, rank: tf.Tensor, tensor: tf.Tensor
) -> tf.Tensor:
    """The rows of ``grad`` that belong to ``rank``, as many as ``tensor``, its input, has. XLA needs a static size,
    which the shape of ``tensor`` gives; the offset may be dynamic."""
    size = tf.concat([[1], tf.shape(tensor)], 0)[-tf.rank(grad) :]
    first = tf.gather(tf.cumsum(tf.cast(counts, tf.int32), exclusive=True), rank)
    return tf.slice(grad, tf.concat([[first], tf.zeros_like(size)[1:]], 0), size)


def _broadcast(forward: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """The average on the root, zeros on other ranks: the operation uses only the root's tensor."""
    is_root = tf.equal(rank_in(0), forward.op.get_attr("root_rank"))
    return [tf.where(is_root, grad, tf.zeros_like(grad)) for grad in forward.average(grads)]


def _alltoall(forward: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """Each row's gradient returns to the rank that sent the row. Rows that were not sent get zeros."""
    returned, _ = forward.run("alltoall", grads, splits=forward.op.outputs[1])
    missing = tf.shape(forward.op.inputs[0])[:1] - tf.shape(returned)[:1]
    shape = tf.concat([missing, tf.shape(returned)[1:]], 0)
    return [tf.concat([returned, tf.zeros(shape, returned.dtype)], 0), None]


def _reducescatter(forward: Forward, grads: Sequence[tf.Tensor]) -> Sequence[Any]:
    """All rows of the gradient. For Sum they are multiplied by the number of ranks, as if each rank's loss were the sum
    of all losses."""
    gathered = as_list(forward.run("allgather", grads)[0])
    factor = tf.constant(
        forward.number("prescale_factor") * forward.number("postscale_factor"), tf.float64
    )
    if forward.op.get_attr("reduce_op") == Sum:
        factor *= tf.cast(size_of(forward.process_set), tf.float64)
    return [grad * tf.cast(factor, grad.dtype) for grad in gathered]


Rule = Callable[[Forward, Sequence[tf.Tensor]], Sequence[Any]]

# By the name of the operation: maps the gradients of its outputs to those of its inputs.
_RULES: dict[str, Rule] = {
    "Allreduce": _allreduce,
    "GroupedAllreduce": _allreduce,
    "Allgather": _allgather,
    "GroupedAllgather": _allgather,
    "Broadcast": _broadcast,
    "Alltoall": _alltoall,
    "Reducescatter": _reducescatter,
    "GroupedReducescatter": _reducescatter,
}


def gradient(op: Any, *grads: Any) -> list[Any]:
    """The gradients of an operation's inputs."""
    forward = Forward(op)
    rule = _RULES[op.type.removeprefix("Horovod")]
    return list(rule(forward, forward.dense(grads)))


for _name in _RULES:
    tf.RegisterGradient(f"Horovod{_name}")(gradient)
    xla.register_gradient(f"Horovod{_name}", gradient)
_QUERIES = ("Size", "LocalSize", "Rank", "LocalRank", "ProcessSetIncluded", "Defers")
for _name in ("Join", "Barrier", *_QUERIES):
    tf.no_gradient(f"Horovod{_name}")
