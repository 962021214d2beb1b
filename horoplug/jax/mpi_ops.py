"""All operations on JAX arrays and pytrees of arrays. (The module's name is Horovod's; it does not use MPI.)

On concrete arrays the operations run at once. Inside of ``jax.jit``, ``lax.scan`` and other transformations they become
part of the compiled program and run in the order in which the Python program calls them. The arrays of a pytree succeed
or fail together; those of one dtype are one operation. ``name`` matches the calls of the ranks; without a name, the
n-th call of an operation on one rank is matched with the n-th on the others.

The functions raise TypeError and ValueError for a mistake of this rank alone, and HorovodInternalError if ranks
disagree or one has failed. In a compiled program both are jax.errors.JaxRuntimeError, raised when its results are used.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horoplug.common import calls, variants
from horoplug.common.compression import AnyCompressor, pack
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.partition import join_parts, split_group
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.jax import eager
from horoplug.jax import rules as rules
from horoplug.jax.compression import Compression
from horoplug.jax.order import wait_for_programs
from horoplug.jax.primitive import bind

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
    """Apply an operation to the arrays of a pytree: one operation for all arrays of one dtype."""
    spec = BY_NAME[operation]
    if operation != "broadcast":
        refuse_sparse(operation, tree)
    leaves, structure = jax.tree_util.tree_flatten(tree)
    packed = pack(compression, [eager.to_array(leaf) for leaf in leaves], spec.casts)
    call = call._replace(wire_dtype=packed.wire_dtype)
    for array in packed.tensors:
        spec.check_ndim(array.ndim)
        if array.dtype.name == "bool":
            spec.check_bool(call.reduce_op)
    is_traced = any(isinstance(array, jax.core.Tracer) for array in packed.tensors)
    parts = split_group(call.name, [array.dtype.name for array in packed.tensors], str)
    results = []
    for part in parts:
        arrays, named = part.select(packed.tensors), call._replace(name=part.name)
        if is_traced:
            results.append(bind(operation, arrays, named))
        else:
            results.append([output for output, _ in eager.perform(operation, arrays, named)])
    outputs = packed.unpack(join_parts(parts, results))
    return jax.tree_util.tree_unflatten(structure, outputs)


def refuse_sparse(operation: str, tree: Any) -> None:
    """Raises TypeError for a sparse array in a pytree. Its leaves are its values and its indices, which cannot be
    reduced or gathered each by itself."""
    sparse = sys.modules.get("jax.experimental.sparse")
    if sparse is None:  # the program has no sparse arrays
        return
    kind = sparse.JAXSparse
    for leaf in jax.tree_util.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind)):
        if isinstance(leaf, kind):
            raise TypeError(
                f"{operation} takes dense arrays, got a {type(leaf).__name__} of shape {leaf.shape}; use its todense()"
            )


def _check_list(operation: str, tensors: Any) -> None:
    if not isinstance(tensors, (list, tuple)):  # an array would be one leaf of a pytree
        raise TypeError(f"grouped_{operation} takes a list of arrays, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"grouped_{operation} needs at least one array")


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce arrays of one shape over all ranks, element by element; every rank gets the result. Differentiable for
    Average, Sum and Adasum.

    ``tensor``: an array, or a pytree of arrays, of the same shapes and dtypes on all ranks, which are those of the
    result. ``name`` pairs the calls of the ranks; without it, the order of the calls does. ``process_set``: the ranks
    that take part; by default all ranks of the job. ``compression``: an attribute of :class:`Compression`, or a class
    of your own. ``op``: Average (the default), Sum, Adasum, Min, Max or Product; ``average`` is deprecated in favour of
    it. ``prescale_factor``, ``postscale_factor``: factors for each rank's array and for the result.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([1.0 + hvd.rank(), 2.0])
        hvd.allreduce(x, op=hvd.Sum)  # -> [3.0, 4.0]
        jax.jit(hvd.allreduce)({"a": x})  # -> {"a": [1.5, 2.0]}
    """
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    return _apply("allreduce", tensor, call, compression)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """:func:`allreduce` of a list.

    ``tensors``: a list of arrays, of the same shapes and dtypes on all ranks. The result is a list of arrays.

    The other arguments are those of :func:`allreduce`.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([1.0 + hvd.rank(), 2.0])
        hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Sum)  # -> [[3.0, 4.0], [6.0, 8.0]]
    """
    _check_list("allreduce", tensors)
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    results: list[Any] = _apply("allreduce", list(tensors), call, compression)
    return results


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' arrays along the first dimension in rank order; a scalar counts as one row.
    Differentiable.

    The first dimension may differ between ranks, except inside of ``jax.jit`` and under differentiation: there shapes
    are fixed before the ranks communicate, and a difference is an error when the operation runs.

    ``tensor``: an array, or a pytree of arrays, of the same dtype on all ranks, with rows of the same shape. The result
        has this dtype.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        hvd.allgather(jnp.array([1.0 + hvd.rank()]))  # -> [1.0, 2.0]
    """
    return _apply("allgather", tensor, calls.allgather(name, process_set))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """:func:`allgather` of a list.

    ``tensors``: a list of arrays, of the same dtypes on all ranks, with rows of the same shapes. The result is a list
        of arrays.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([1.0 + hvd.rank()])
        hvd.grouped_allgather([x, 2.0 * x])  # -> [[1.0, 2.0], [2.0, 4.0]]
    """
    _check_list("allgather", tensors)
    results: list[Any] = _apply("allgather", list(tensors), calls.allgather(name, process_set))
    return results


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the array, or the pytree of arrays, of rank `root_rank` (a global rank) to every rank. Shapes are the same
    on all ranks. Differentiable.

    ``tensor``: an array, or a pytree of arrays, of the same shapes and dtypes on all ranks, which are those of the
        result.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([1.0 + hvd.rank(), 2.0])
        hvd.broadcast(x, root_rank=0)  # -> [1.0, 2.0]
    """
    return _apply("broadcast", tensor, calls.broadcast(root_rank, name, process_set))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows (first dimension) of an array to rank i, taken in order, and concatenate the received rows
    in rank order. Rows beyond the splits are not sent. Without `splits`, each rank gets an equal part. With `splits`
    (integers, one for each rank), the result is (output, rows received from each rank). Differentiable.

    Inside of ``jax.jit`` and under differentiation, all ranks pass the same ``splits``, as constants, and arrays of one
    shape.

    ``tensor``: an array of the same dtype on all ranks, with rows of the same shape. The result has this dtype.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([10.0 * hvd.rank(), 10.0 * hvd.rank() + 1.0])
        hvd.alltoall(x)  # -> [0.0, 10.0] on rank 0, [1.0, 11.0] on rank 1
        hvd.alltoall(x, splits=[0, 2])  # -> ([], [0, 0]) on rank 0, ([0.0, 1.0, 10.0, 11.0], [2, 2]) on rank 1
    """
    call = calls.alltoall(_counts(splits), name, process_set)
    array = eager.to_array(tensor)
    BY_NAME["alltoall"].check_ndim(array.ndim)
    if not isinstance(array, jax.core.Tracer):
        ((output, received),) = eager.perform("alltoall", [array], call)
        return output if splits is None else (output, jnp.asarray(received, jnp.int32))
    if call.splits is None:
        return bind("alltoall", [array], call)[0]
    size = process_set.size() or 0
    if len(call.splits) != size:
        raise ValueError(f"splits has {len(call.splits)} entries for {size} ranks")
    output = bind("alltoall", [array[: sum(call.splits)]], call)[0]
    return output, jnp.full(size, output.shape[0] // size, jnp.int32)


def _counts(splits: Any) -> tuple[int, ...] | None:
    if splits is None:
        return None
    if isinstance(splits, jax.core.Tracer):
        raise TypeError("splits= must be known when alltoall is traced: pass a list of integers")
    counts = np.asarray(splits)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise ValueError("splits= takes one integer for each rank")
    return tuple(int(count) for count in counts)


def reducescatter(
    tensor: Any,
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce like :func:`allreduce` (Average or Sum only) and return this rank's share of the rows (first dimension).
    The first `rows % size` ranks get one row more than the others. Differentiable.

    ``tensor``: an array, or a pytree of arrays, of the same shapes, with at least one dimension, and dtypes on all
        ranks. The result has these dtypes.

    The other arguments are those of :func:`allreduce`.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([1.0 + hvd.rank(), 2.0])
        hvd.reducescatter(x, op=hvd.Sum)  # -> [3.0] on rank 0, [4.0] on rank 1
    """
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    return _apply("reducescatter", tensor, call, compression)


def grouped_reducescatter(
    tensors: Sequence[Any],
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """:func:`reducescatter` of a list.

    ``tensors``: a list of arrays, of the same shapes and dtypes on all ranks. The result is a list of arrays.

    The other arguments are those of :func:`allreduce`.

    Raises NotInitializedError before ``init``, TypeError or ValueError for what is invalid on this rank, and
    HorovodInternalError if the ranks disagree or a rank has failed. For an operation inside of ``jax.jit``, JAX raises
    jax.errors.JaxRuntimeError when its results are used.

    Example, on two ranks:

        x = jnp.array([1.0 + hvd.rank(), 2.0])
        hvd.grouped_reducescatter([x, 2.0 * x], op=hvd.Sum)  # -> [[3.0], [6.0]] on rank 0, [[4.0], [8.0]] on rank 1
    """
    _check_list("reducescatter", tensors)
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    results: list[Any] = _apply("reducescatter", list(tensors), call, compression)
    return results


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called this function, and the operations in all programs that this
    thread has dispatched have completed. Not for use inside of ``jax.jit``.

    ``process_set``: by default all ranks of the job. Raises the exceptions of :func:`horoplug.barrier`.

    Example, on two ranks:

        if hvd.rank() == 0:
            with open("data.txt", "w") as file:
                file.write("downloaded once")
        hvd.barrier()
        open("data.txt").read()  # -> "downloaded once"
    """
    wait_for_programs()
    variants.barrier(process_set)


def join(process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no more data, and wait until every rank of the set has joined. Returns the global rank
    that joined last. Not for use inside of ``jax.jit``. See :func:`horoplug.common.variants.join`.

    ``process_set``: by default all ranks of the job. Raises the exceptions of :func:`horoplug.join`.

    Example, on two ranks:

        for batch in range(2 + hvd.rank()):  # rank 1 has more data
            hvd.allreduce(jnp.array([1.0]), name=f"batch {batch}", op=hvd.Sum)
        hvd.join()  # -> 1
    """
    wait_for_programs()
    return variants.join(process_set=process_set)
