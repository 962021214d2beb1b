"""All operations on JAX's arrays and pytrees of them. (The module's name is Horovod's; there is no MPI in it.)

They run at once on concrete arrays, and as a part of the program inside of ``jax.jit``, ``lax.scan`` and the rest, in
the order in which the Python program calls them. The arrays of a pytree are done together or not at all, those of one
dtype in one operation. ``name`` pairs the calls of the ranks; without one, the n-th call of a kind on each rank is.

Raise TypeError and ValueError for what this rank alone has wrong, and HorovodInternalError if ranks disagree or one is
gone; in a compiled program both are jax.errors.JaxRuntimeError, when its results are used.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horoplug.common import calls, variants
from horoplug.common.compression import pack
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.jax import adapter
from horoplug.jax import rules as rules
from horoplug.jax.compression import Compression
from horoplug.jax.order import wait_for_programs
from horoplug.jax.primitive import run

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


def _apply(operation: str, tree: Any, call: Call, compression: Any = Compression.none) -> Any:
    """An operation on the arrays of a pytree: on all of one dtype at once."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays, wire, unpack = pack(
        compression, [adapter.to_array(leaf) for leaf in leaves], BY_NAME[operation].casts
    )
    call = call._replace(wire_dtype=wire)
    if BY_NAME[operation].min_ndim and any(not array.ndim for array in arrays):
        raise ValueError(f"{operation} needs a first dimension to divide; a scalar has none.")
    places: dict[Any, list[int]] = {}
    for place, array in enumerate(arrays):
        places.setdefault(array.dtype, []).append(place)
    is_traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    outputs: dict[int, Any] = {}
    for dtype, of_dtype in places.items():
        if BY_NAME[operation].reduces and dtype.name == "bool" and call.reduce_op == Average:
            raise ValueError(
                f"{operation} of bool has no average; use op=Max (or) or op=Min (and)."
            )
        name = f"{call.name}.{dtype.name}" if call.name and len(places) > 1 else call.name
        part, named = [arrays[place] for place in of_dtype], call._replace(name=name)
        results = (
            run(operation, part, named)
            if is_traced
            else [output for output, _ in adapter.perform(operation, part, named)]
        )
        outputs.update(zip(of_dtype, results, strict=True))
    results = unpack(outputs[place] for place in range(len(arrays)))
    return jax.tree_util.tree_unflatten(structure, results)


def _check_list(operation: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)):  # an array would be taken as a whole
        raise TypeError(
            f"grouped_{operation} takes a list of arrays, got {type(tensors).__name__}."
        )
    if not tensors:
        raise ValueError(f"grouped_{operation} needs at least one array.")


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce arrays of one shape over all ranks, element by element; every rank gets the result. Differentiable
    (Average, Sum, Adasum).

    ``tensor``: an array, or a pytree of arrays. ``compression`` is taken from :class:`Compression`."""
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    return _apply("allreduce", tensor, call, compression)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """:func:`allreduce` of a list."""
    _check_list("allreduce", tensors)
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    return _apply("allreduce", list(tensors), call, compression)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Join the ranks' arrays along the first dimension in rank order; a scalar counts as one row. Differentiable.

    The first dimension may differ between ranks, but not inside of ``jax.jit``, nor where it is differentiated:
    shapes are fixed there before ranks know of each other. (An error when it runs.)"""
    return _apply("allgather", tensor, calls.allgather(name, process_set))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """:func:`allgather` of a list."""
    _check_list("allgather", tensors)
    return _apply("allgather", list(tensors), calls.allgather(name, process_set))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the array, or the pytree of arrays, of rank `root_rank` (a global rank); shapes are the same on
    all ranks. Differentiable."""
    return _apply("broadcast", tensor, calls.broadcast(root_rank, name, process_set))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows (first dimension) of an array to rank i, taken in order, and join what arrives in rank
    order; rows beyond the splits stay here. Without `splits`, equal parts. Given `splits` (integers, one for each
    rank), the result is (output, rows received from each rank). Differentiable.

    Inside of ``jax.jit``, and where it is differentiated, all ranks have to pass the same ``splits``, as constants, and
    arrays of one shape."""
    call = calls.alltoall(_counts(splits), name, process_set)
    array = adapter.to_array(tensor)
    if not array.ndim:
        raise ValueError("alltoall needs a first dimension to divide; a scalar has none.")
    if not isinstance(array, jax.core.Tracer):
        ((output, received),) = adapter.perform("alltoall", [array], call)
        return output if splits is None else (output, jnp.asarray(received, jnp.int32))
    if call.splits is None:
        return run("alltoall", [array], call)[0]
    size = process_set.size() or 0
    if len(call.splits) != size:
        raise ValueError(f"splits has {len(call.splits)} entries for {size} ranks.")
    output = run("alltoall", [array[: sum(call.splits)]], call)[0]
    return output, jnp.full(size, output.shape[0] // size, jnp.int32)


def _counts(splits: Any) -> tuple[int, ...] | None:
    if splits is None:
        return None
    if isinstance(splits, jax.core.Tracer):
        raise TypeError("splits= must be known when alltoall is traced: pass a list of integers.")
    counts = np.asarray(splits)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ValueError("splits= takes one integer for each rank.")
    return tuple(int(count) for count in counts)


def reducescatter(
    tensor: Any,
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce like :func:`allreduce` (Average or Sum only), then keep this rank's share of the rows (first dimension);
    the first `rows % size` ranks get one more. Differentiable."""
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    return _apply("reducescatter", tensor, call, compression)


def grouped_reducescatter(
    tensors: Sequence[Any],
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """:func:`reducescatter` of a list."""
    _check_list("reducescatter", tensors)
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    return _apply("reducescatter", list(tensors), call, compression)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set is here, and all programs that this thread has dispatched have done
    their operations. Not for the inside of ``jax.jit``."""
    wait_for_programs()
    variants.barrier(process_set)


def join(process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until every rank of the set has; returns the (global) rank that was
    the last. Not for the inside of ``jax.jit``. See :func:`horoplug.common.variants.join`."""
    wait_for_programs()
    return variants.join(process_set=process_set)
