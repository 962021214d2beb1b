"""How operations are differentiated and vmapped.

The rules of gradients are Horovod's. They take the ranks' losses to be averaged, as the optimizer does: the gradient of
an operation whose result every rank uses is the *average* of what the ranks send back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad, batching

from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call, Output
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum
from horoplug.jax.primitive import Place, collective_p, place_in, run

_TANGENT, _GRADIENT = ".tangent", ".gradient"


def _renamed(call: Call, suffix: str) -> str | None:
    return call.name and call.name.removesuffix(_TANGENT) + suffix


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, operation: str, call: Call, place: Place
) -> tuple[Any, Any]:
    """Tangents go the same way."""
    if BY_NAME[operation].reduces and call.reduce_op not in (Average, Sum, Adasum):
        raise NotImplementedError(
            f"{operation} with op={NAMES[call.reduce_op]} has no gradient; use jax.lax.stop_gradient on its input."
        )
    outputs = run(operation, primals, call, place)
    if not jnp.issubdtype(primals[0].dtype, jnp.floating):
        return outputs, [ad.Zero.from_primal_value(output) for output in outputs]
    call = call._replace(name=_renamed(call, _TANGENT))
    return outputs, run(operation, [ad.instantiate_zeros(t) for t in tangents], call, place)


Grads = Sequence[Any]
Shapes = Sequence[tuple[int, ...]]
# From the gradients of the outputs to those of the inputs, which have these shapes.
Rule = Callable[[Grads, Shapes, Call, Place], list[Any]]


def _average(grads: Grads, call: Call, place: Place) -> list[Any]:
    average = Call(call.name, reduce_op=Average, process_set=call.process_set)
    return run("allreduce", grads, average, place._replace(rows=-1))


def _allreduce(grads: Grads, shapes: Shapes, call: Call, place: Place) -> list[Any]:
    return run("allreduce", grads, call, place)


def _allgather(grads: Grads, shapes: Shapes, call: Call, place: Place) -> list[Any]:
    """This rank's rows of the average."""

    def mine(grad: Any, shape: tuple[int, ...]) -> Any:
        rows = shape[0] if shape else 1
        return grad[place.number * rows :][:rows].reshape(shape)

    return [mine(g, s) for g, s in zip(_average(grads, call, place), shapes, strict=True)]


def _broadcast(grads: Grads, shapes: Shapes, call: Call, place: Place) -> list[Any]:
    """Only the root's array had an effect."""
    averages = _average(grads, call, place_in(call.process_set))
    is_root = context.mesh().rank == call.root
    return averages if is_root else [jnp.zeros_like(average) for average in averages]


def _alltoall(grads: Grads, shapes: Shapes, call: Call, place: Place) -> list[Any]:
    """Every row goes back where it came from; rows that were sent nowhere had no effect."""
    (grad,), (shape,) = grads, shapes
    if call.splits is None:
        return run("alltoall", [grad], call, place)
    back = (call.splits[place.number],) * place.size
    returned = run(
        "alltoall", [grad], call._replace(splits=back), place._replace(rows=sum(call.splits))
    )[0]
    rest = jnp.zeros((shape[0] - returned.shape[0], *shape[1:]), returned.dtype)
    return [jnp.concatenate([returned, rest])]


def _reducescatter(grads: Grads, shapes: Shapes, call: Call, place: Place) -> list[Any]:
    """All rows of the gradient; times the ranks for Sum, as if each rank's loss were the sum of theirs."""
    factor = call.prescale * call.postscale * (place.size if call.reduce_op == Sum else 1)
    gathering = Call(call.name, process_set=call.process_set)
    gathered = [
        run("allgather", [grad], _part(gathering, i, len(grads)), place._replace(rows=shape[0]))[0]
        for i, (grad, shape) in enumerate(zip(grads, shapes, strict=True))
    ]
    return [grad * jnp.asarray(factor, grad.dtype) for grad in gathered]


def _part(call: Call, index: int, count: int) -> Call:
    return call._replace(name=f"{call.name}.{index}") if call.name and count > 1 else call


_RULES: dict[str, Rule] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}


def _transpose(
    grads: Sequence[Any], *inputs: Any, operation: str, call: Call, place: Place
) -> list[Any]:
    # All of a group, so that ranks do the same whichever results they have used.
    dense = [ad.instantiate_zeros(grad) for grad in grads]
    shapes = [value.aval.shape for value in inputs]
    return _RULES[operation](dense, shapes, call._replace(name=_renamed(call, _GRADIENT)), place)


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], *, operation: str, call: Call, place: Place
) -> tuple[Any, Any]:
    """One operation on all of the batch."""
    if call.reduce_op == Adasum and operation == "allreduce":
        raise NotImplementedError(
            "allreduce with op=Adasum cannot be vmapped: it is not elementwise."
        )
    if BY_NAME[operation].output is not Output.ROWS:
        return run(operation, arrays, call, place), dims

    # The first dimension is that of the rows.
    def batch_second(array: Any, dim: int | None) -> Any:
        if dim is None:
            return array
        return array.reshape(1, -1) if array.ndim == 1 else jnp.moveaxis(array, dim, 1)

    moved = [batch_second(array, dim) for array, dim in zip(arrays, dims, strict=True)]
    outputs = run(operation, moved, call, place)
    return outputs, [None if dim is None else 1 for dim in dims]


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
