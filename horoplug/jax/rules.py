"""Differentiation and batching (vmap) of the operations.

The gradient rules are Horovod's. They assume that the ranks' losses are averaged, as the optimizer does: for an
operation whose result every rank uses, the gradient is the *average* of the gradients of all ranks.

Every operation but Adasum is linear with real coefficients. So the rules need no conjugation for complex arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad, batching

from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call, Output
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum
from horoplug.jax.primitive import SetPosition, bind, collective_p, position_in

_TANGENT, _GRADIENT = ".tangent", ".gradient"


def _renamed(call: Call, suffix: str) -> str | None:
    return call.name and call.name.removesuffix(_TANGENT) + suffix


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    operation: str,
    call: Call,
    position: SetPosition,
) -> tuple[Any, Any]:
    """The tangents go through the same operation.

    The arrays are real or complex: JAX does not ask for a rule if all tangents are zero, such as those of integers and
    bool, and the arrays of one operation have one dtype."""
    if BY_NAME[operation].reduces and call.reduce_op not in (Average, Sum, Adasum):
        raise NotImplementedError(
            f"{operation} with op={NAMES[call.reduce_op]} has no gradient; use jax.lax.stop_gradient on its input"
        )
    outputs = bind(operation, primals, call, position)
    call = call._replace(name=_renamed(call, _TANGENT))
    return outputs, bind(operation, [ad.instantiate_zeros(t) for t in tangents], call, position)


Grads = Sequence[Any]
Shapes = Sequence[tuple[int, ...]]
# A gradient rule: maps the gradients of the outputs, and the shapes of the inputs, to the gradients of the inputs.
Rule = Callable[[Grads, Shapes, Call, SetPosition], list[Any]]


def _average(grads: Grads, call: Call, position: SetPosition) -> list[Any]:
    average = Call(call.name, reduce_op=Average, process_set=call.process_set)
    return bind("allreduce", grads, average, position._replace(rows=-1))


def _allreduce(grads: Grads, shapes: Shapes, call: Call, position: SetPosition) -> list[Any]:
    return bind("allreduce", grads, call, position)


def _allgather(grads: Grads, shapes: Shapes, call: Call, position: SetPosition) -> list[Any]:
    """This rank's rows of the average."""

    def own_rows(grad: Any, shape: tuple[int, ...]) -> Any:
        rows = shape[0] if shape else 1
        return grad[position.rank * rows :][:rows].reshape(shape)

    return [own_rows(g, s) for g, s in zip(_average(grads, call, position), shapes, strict=True)]


def _broadcast(grads: Grads, shapes: Shapes, call: Call, position: SetPosition) -> list[Any]:
    """The average on the root, zeros on other ranks: the operation uses only the root's array."""
    averages = _average(grads, call, position_in(call.process_set))
    is_root = context.connections().rank == call.root
    return averages if is_root else [jnp.zeros_like(average) for average in averages]


def _alltoall(grads: Grads, shapes: Shapes, call: Call, position: SetPosition) -> list[Any]:
    """Each row's gradient returns to the rank that sent the row. Rows that were not sent get zeros."""
    (grad,), (shape,) = grads, shapes
    if call.splits is None:
        return bind("alltoall", [grad], call, position)
    back = (call.splits[position.rank],) * position.size
    returned = bind(
        "alltoall", [grad], call._replace(splits=back), position._replace(rows=sum(call.splits))
    )[0]
    rest = jnp.zeros((shape[0] - returned.shape[0], *shape[1:]), returned.dtype)
    return [jnp.concatenate([returned, rest])]


def _reducescatter(grads: Grads, shapes: Shapes, call: Call, position: SetPosition) -> list[Any]:
    """All rows of the gradient. For Sum they are multiplied by the number of ranks, as if each rank's loss were the sum
    of all losses."""
    factor = call.prescale * call.postscale * (position.size if call.reduce_op == Sum else 1)
    gathering = Call(call.name, process_set=call.process_set)
    gathered = [
        bind(
            "allgather",
            [grad],
            _indexed(gathering, i, len(grads)),
            position._replace(rows=shape[0]),
        )[0]
        for i, (grad, shape) in enumerate(zip(grads, shapes, strict=True))
    ]
    return [grad * jnp.asarray(factor, grad.dtype) for grad in gathered]


def _indexed(call: Call, index: int, count: int) -> Call:
    return call._replace(name=f"{call.name}.{index}") if call.name and count > 1 else call


_RULES: dict[str, Rule] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}


def _transpose(
    grads: Sequence[Any], *inputs: Any, operation: str, call: Call, position: SetPosition
) -> list[Any]:
    # Reduce the gradients of the whole group, so that all ranks run the same operations even if they use different
    # results.
    dense = [ad.instantiate_zeros(grad) for grad in grads]
    shapes = [value.aval.shape for value in inputs]
    return _RULES[operation](dense, shapes, call._replace(name=_renamed(call, _GRADIENT)), position)


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], *, operation: str, call: Call, position: SetPosition
) -> tuple[Any, Any]:
    """One operation on the whole batch."""
    if call.reduce_op == Adasum and operation == "allreduce":
        raise NotImplementedError(
            "allreduce with op=Adasum cannot be vmapped: it is not elementwise"
        )
    if BY_NAME[operation].output is not Output.ROWS:
        return bind(operation, arrays, call, position), dims

    # The first dimension stays that of the rows; the batch dimension becomes the second one.
    def batch_second(array: Any, dim: int | None) -> Any:
        if dim is None:
            return array
        return array.reshape(1, -1) if array.ndim == 1 else jnp.moveaxis(array, dim, 1)

    moved = [batch_second(array, dim) for array, dim in zip(arrays, dims, strict=True)]
    outputs = bind(operation, moved, call, position)
    return outputs, [None if dim is None else 1 for dim in dims]


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
