"""All operations on TensorFlow tensors. (The module's name is Horovod's; it does not use MPI.)

They run eagerly, inside of ``tf.function``, and in graphs of TensorFlow 1. In a graph any number of operations is in
flight concurrently, and ranks may start them in different orders. Errors are TensorFlow's: FailedPreconditionError if
the ranks disagree or ``init`` was not called, InvalidArgumentError for a mistake of this rank alone, UnknownError if
the job is broken (a rank has failed or a time limit has passed).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horoplug.common import calls
from horoplug.common.api import *  # noqa: F403
from horoplug.common.arguments import shown
from horoplug.common.compression import AnyCompressor, pack
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.partition import join_parts, split_group
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import NAMES, Average, Sum
from horoplug.tensorflow import gradients as gradients
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.library import do_not_convert
from horoplug.tensorflow.operations import emit, run, size_of, to_tensor

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


def _device(name: str) -> Any:
    return tf.device(name) if name else contextlib.nullcontext()


def _reduce(
    operation: str, tensor: Any, call: Call, compression: Any, ignore_name_scope: bool
) -> tf.Tensor:
    converted = [to_tensor(tensor)]
    packed = pack(compression, converted, BY_NAME[operation].casts)
    call = call._replace(wire_dtype=packed.wire_dtype)
    output = run(operation, packed.tensors, call, ignore_name_scope=ignore_name_scope)
    return packed.unpack([output])[0]


def _converted(operation: str, tensors: Any) -> list[tf.Tensor]:
    if not isinstance(tensors, (list, tuple)):  # a single tensor would be iterated over its rows
        raise TypeError(
            f"grouped_{operation} takes a list of tensors, got {type(tensors).__name__}"
        )
    if not tensors:
        raise ValueError(f"grouped_{operation} needs at least one tensor")
    return [to_tensor(tensor) for tensor in tensors]


def _run_group(
    operation: str, tensors: Sequence[tf.Tensor], call: Call, ignore_name_scope: bool = False
) -> list[list[tf.Tensor]]:
    """The outputs of a grouped operation for each tensor. The tensors of each dtype are one operation."""
    parts = split_group(call.name, [tensor.dtype for tensor in tensors], lambda dtype: dtype.name)
    outputs = []
    for part in parts:
        result = run(
            operation,
            part.select(tensors),
            call._replace(name=part.name),
            grouped=True,
            ignore_name_scope=ignore_name_scope,
        )
        lists = result if isinstance(result, tuple) else (result,)
        outputs.append([list(of_tensor) for of_tensor in zip(*lists, strict=True)])
    return join_parts(parts, outputs)


def _reduce_group(
    operation: str, tensors: Sequence[Any], call: Call, compression: Any, ignore_name_scope: bool
) -> list[tf.Tensor]:
    converted = _converted(operation, tensors)
    packed = pack(compression, converted, BY_NAME[operation].casts)
    call = call._replace(wire_dtype=packed.wire_dtype)
    results = _run_group(operation, packed.tensors, call, ignore_name_scope)
    return packed.unpack(result for (result,) in results)


def _dense_shape(slices: tf.IndexedSlices) -> tf.TensorShape:
    """The sizes of the whole tensor, as far as they are known while a graph is built. Programs also give them as a
    list."""
    sizes = slices.dense_shape
    return slices.shape if sizes is None or tf.is_tensor(sizes) else tf.TensorShape(list(sizes))


def _allreduce_slices(
    slices: tf.IndexedSlices, call: Call, compression: Any, ignore_name_scope: bool
) -> tf.IndexedSlices:
    if call.reduce_op not in (Average, Sum):
        raise NotImplementedError(
            f"allreduce of tf.IndexedSlices supports op=Average and op=Sum, not {NAMES[call.reduce_op]}; "
            "convert it to a dense tensor with tf.convert_to_tensor"
        )
    if call.prescale != 1.0 or call.postscale != 1.0:
        raise NotImplementedError(
            "allreduce of tf.IndexedSlices does not support prescale_factor and postscale_factor; convert it to a "
            "dense tensor with tf.convert_to_tensor"
        )
    layout = (
        f"tf.IndexedSlices of {slices.dtype.name} {_dense_shape(slices)} ({NAMES[call.reduce_op]})"
    )
    gathering = Call(process_set=call.process_set, layout=layout)

    def gather(tensor: tf.Tensor, suffix: str) -> tf.Tensor:
        name = call.name and f"{call.name}.{suffix}"
        named = gathering._replace(name=name)
        return run("allgather", [tensor], named, ignore_name_scope=ignore_name_scope)[0]

    packed, kept = compression.compress(slices.values)
    values = compression.decompress(gather(packed, "values"), kept)
    indices = gather(slices.indices, "indices")
    if call.reduce_op == Average:
        values = values / tf.cast(size_of(call.process_set), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor of one shape over all ranks, element by element; every rank gets the result. Differentiable for
    Average, Sum and Adasum.

    A ``tf.IndexedSlices`` is reduced by gathering the slices of all ranks (Average and Sum only, without factors). The
    result is a ``tf.IndexedSlices``, which may contain an index more than once. Its ``dense_shape`` has to be the same
    on all ranks.

    ``tensor``: a tensor, or what TensorFlow converts to one, of the same shape and dtype on all ranks.
    ``average``: deprecated; True means op=Average, False means op=Sum.
    ``device_dense``, ``device_sparse``: the device on which TensorFlow places the operation.
    ``compression``: an attribute of :class:`Compression`, or a class of your own.
    ``op``: Average (the default), Sum, Adasum, Min, Max or Product.
    ``prescale_factor``, ``postscale_factor``: factors for each rank's tensor before the reduction, and for the result.
    ``name``: pairs the calls of the ranks.
    ``process_set``: the ranks that take part; by default all ranks of the job.
    ``ignore_name_scope``: pair the calls by the name of the graph node without its name scopes.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([1.0 + hvd.rank(), 2.0])
        hvd.allreduce(x, op=hvd.Sum)  # -> [3.0, 4.0]
        hvd.allreduce(x, compression=hvd.Compression.fp16)  # -> [1.5, 2.0]
    """
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        with _device(device_sparse):
            return _allreduce_slices(tensor, call, compression, ignore_name_scope)
    with _device(device_dense):
        return _reduce("allreduce", tensor, call, compression, ignore_name_scope)


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """:func:`allreduce` of a list of tensors, which succeed or fail together. Each ``tf.IndexedSlices`` among them is
    reduced separately.

    ``tensors``: a list; each tensor has the same shape and dtype on all ranks. The result is a list of tensors of these
        shapes and dtypes.

    The other arguments are those of :func:`allreduce`.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([1.0 + hvd.rank(), 2.0])
        hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Sum)  # -> [[3.0, 4.0], [6.0, 8.0]]
    """
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"grouped_allreduce takes a list of tensors, got {type(tensors).__name__}")
    results: dict[int, Any] = {}
    with _device(device_sparse):
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                part = call._replace(name=name and f"{name}.{i}")
                results[i] = _allreduce_slices(tensor, part, compression, ignore_name_scope)
    dense = [i for i in range(len(tensors)) if i not in results]
    if dense or not tensors:
        with _device(device_dense):
            reduced = _reduce_group(
                "allreduce", [tensors[i] for i in dense], call, compression, ignore_name_scope
            )
        results.update(zip(dense, reduced, strict=True))
    return [results[i] for i in range(len(tensors))]


@do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension, which may differ between ranks, in rank order; a scalar
    counts as one row. Differentiable.

    ``tensor``: a tensor of the same dtype on all ranks, with rows of the same shape. The result has this dtype.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does, in a graph the name of the node.
    ``process_set``: the ranks that take part; by default all ranks of the job.
    ``ignore_name_scope``: pair the calls by the name of the graph node without its name scopes.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        hvd.allgather(tf.constant([1.0 + hvd.rank()]))  # -> [1.0, 2.0]
    """
    call = calls.allgather(name, process_set)
    converted = to_tensor(tensor)
    return run("allgather", [converted], call, ignore_name_scope=ignore_name_scope)[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """:func:`allgather` of a list of tensors, which succeed or fail together.

    ``tensors``: a list; each tensor has the same dtype on all ranks, and rows of the same shape. The result is a list
        of tensors.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does, in a graph the name of the node.
    ``process_set``: the ranks that take part; by default all ranks of the job.
    ``ignore_name_scope``: pair the calls by the name of the graph node without its name scopes.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([1.0 + hvd.rank()])
        hvd.grouped_allgather([x, 2.0 * x])  # -> [[1.0, 2.0], [2.0, 4.0]]
    """
    call = calls.allgather(name, process_set)
    results = _run_group("allgather", _converted("allgather", tensors), call, ignore_name_scope)
    return [output for output, _ in results]


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Send the tensor of rank `root_rank` (a global rank) to every rank. Shapes are the same on all ranks.
    Differentiable.

    ``tensor``: a tensor of the same shape and dtype on all ranks, which are those of the result.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does, in a graph the name of the node.
    ``process_set``: the ranks that take part; by default all ranks of the job.
    ``ignore_name_scope``: pair the calls by the name of the graph node without its name scopes.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([1.0 + hvd.rank(), 2.0])
        hvd.broadcast(x, root_rank=0)  # -> [1.0, 2.0]
    """
    call = calls.broadcast(root_rank, name, process_set)
    converted = to_tensor(tensor)
    return run("broadcast", [converted], call, ignore_name_scope=ignore_name_scope)


def _value(variable: Any) -> tf.Tensor:
    """The value of a variable. Raises TypeError, with its name, for one that cannot be broadcast."""
    name = getattr(variable, "path", None) or getattr(variable, "name", None)
    if not hasattr(variable, "assign"):
        raise TypeError(f"broadcast of variables: expected a variable, got {shown(variable)}")
    if getattr(variable.dtype, "name", variable.dtype) == "string":
        raise TypeError(
            f"broadcast of variables: {name} has the dtype string; leave it out, and pass its value to "
            "broadcast_object"
        )
    return to_tensor(variable)


@do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables (of TensorFlow or Keras) with those of rank `root_rank` (a global rank). Returns the results
    of their ``assign`` methods, which a session must run in a graph of TensorFlow 1.

    ``name``: pairs the calls of the ranks; without it, the order of the calls does, in a graph the name of the node.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        variable = tf.Variable([1.0 + hvd.rank(), 2.0])
        hvd.broadcast_([variable], root_rank=0)
        variable  # -> [1.0, 2.0]
    """
    values = [_value(variable) for variable in variables]
    received = [
        broadcast(value, root_rank, f"{name or 'broadcast_'}.{i}", process_set=process_set)
        for i, value in enumerate(values)
    ]
    return [variable.assign(value) for variable, value in zip(variables, received, strict=True)]


@do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows (first dimension) to rank i, taken in order, and concatenate the received rows in rank
    order. Rows beyond the splits are not sent. Without `splits`, each rank gets an equal part. With `splits` (int32,
    one for each rank), the result is (output, rows received from each rank). Differentiable.

    ``tensor``: a tensor of the same dtype on all ranks, with rows of the same shape. The result has this dtype.
    ``name``: pairs the calls of the ranks; without it, the order of the calls does, in a graph the name of the node.
    ``process_set``: the ranks that take part; by default all ranks of the job.
    ``ignore_name_scope``: pair the calls by the name of the graph node without its name scopes.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([10.0 * hvd.rank(), 10.0 * hvd.rank() + 1.0])
        hvd.alltoall(x)  # -> [0.0, 10.0] on rank 0, [1.0, 11.0] on rank 1
        hvd.alltoall(x, splits=[0, 2])  # -> ([], [0, 0]) on rank 0, ([0.0, 1.0, 10.0, 11.0], [2, 2]) on rank 1
    """
    call = calls.alltoall(splits, name, process_set)
    converted = to_tensor(tensor)
    output, received = run("alltoall", [converted], call, ignore_name_scope=ignore_name_scope)
    return output if splits is None else (output, received)


@do_not_convert
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce like :func:`allreduce` (Average or Sum only) and return this rank's share of the rows (first dimension).
    The first `rows % size` ranks get one row more than the others. Differentiable.

    ``tensor``: a tensor of the same shape, with at least one dimension, and the same dtype on all ranks. The result has
        this dtype.

    The other arguments are those of :func:`allreduce`.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([1.0 + hvd.rank(), 2.0])
        hvd.reducescatter(x, op=hvd.Sum)  # -> [3.0] on rank 0, [4.0] on rank 1
    """
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    with _device(device_dense):
        return _reduce("reducescatter", tensor, call, compression, ignore_name_scope)


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """:func:`reducescatter` of a list of tensors, which succeed or fail together.

    ``tensors``: a list; each tensor has the same shape and dtype on all ranks. The result is a list of tensors.

    The other arguments are those of :func:`allreduce`.

    Raises TypeError, ValueError or tf.errors.InvalidArgumentError for what is invalid on this rank,
    tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and tf.errors.UnknownError if a rank
    has failed.

    Example, on two ranks:

        x = tf.constant([1.0 + hvd.rank(), 2.0])
        hvd.grouped_reducescatter([x, 2.0 * x], op=hvd.Sum)  # -> [[3.0], [6.0]] on rank 0, [[4.0], [8.0]] on rank 1
    """
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    with _device(device_dense):
        return _reduce_group("reducescatter", tensors, call, compression, False)


@do_not_convert
def join(process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Declare that this rank has no more data, and wait until every rank of the set has joined. Returns the global rank
    that joined last, as an int32 scalar. See :func:`horoplug.common.variants.join`.

    ``process_set``: by default all ranks of the job. Raises TypeError, ValueError or tf.errors.InvalidArgumentError for
    what is invalid on this rank, tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and
    tf.errors.UnknownError if a rank has failed.

    Example, on two ranks:

        for batch in range(2 + hvd.rank()):  # rank 1 has more data
            hvd.allreduce(tf.constant([1.0]), name=f"batch {batch}", op=hvd.Sum)
        hvd.join()  # -> 1
    """
    return emit("join", process_set_id=process_set_id(process_set), blocking=tf.executing_eagerly())


@do_not_convert
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Wait until every rank of the process set has called this function. In a graph of TensorFlow 1: returns the
    operation.

    ``process_set``: by default all ranks of the job. Raises TypeError, ValueError or tf.errors.InvalidArgumentError for
    what is invalid on this rank, tf.errors.FailedPreconditionError before ``init`` and if the ranks disagree, and
    tf.errors.UnknownError if a rank has failed.

    Example, on two ranks:

        if hvd.rank() == 0:
            with open("data.txt", "w") as file:
                file.write("downloaded once")
        hvd.barrier()
        open("data.txt").read()  # -> "downloaded once"
    """
    waiting = emit(
        "barrier", process_set_id=process_set_id(process_set), blocking=tf.executing_eagerly()
    )
    # A tf.function can return tensors only.
    return None if tf.inside_function() else waiting


# Numbers that are evaluated when a graph runs, so that the graph can be used in another job.


@do_not_convert
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in a process set, as an int32 scalar.

    ``process_set_id``: 0 for all ranks of the job. ``name``: of the graph node. Raises
    tf.errors.FailedPreconditionError before ``init``.

    Example, on two ranks of one host:

        hvd.size_op()  # -> 2
    """
    return emit("size", process_set_id=process_set_id, name=name)


@do_not_convert
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host, as an int32 scalar.

    ``name``: of the graph node. Raises tf.errors.FailedPreconditionError before ``init``.

    Example, on two ranks of one host:

        hvd.local_size_op()  # -> 2
    """
    return emit("local_size", name=name)


@do_not_convert
def rank_op(name: str | None = None) -> tf.Tensor:
    """The number of this rank, as an int32 scalar.

    ``name``: of the graph node. Raises tf.errors.FailedPreconditionError before ``init``.

    Example, on two ranks of one host:

        hvd.rank_op()  # -> 0 on rank 0, 1 on rank 1
    """
    return emit("rank", name=name)


@do_not_convert
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """The rank of this process among those on its host, as an int32 scalar.

    ``name``: of the graph node. Raises tf.errors.FailedPreconditionError before ``init``.

    Example, on two ranks of one host:

        hvd.local_rank_op()  # -> 0 on rank 0, 1 on rank 1
    """
    return emit("local_rank", name=name)


@do_not_convert
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set, 0 or 1, as an int32 scalar.

    ``process_set_id``: 0 for all ranks of the job. ``name``: of the graph node. Raises
    tf.errors.FailedPreconditionError before ``init``.

    Example, on two ranks of one host:

        hvd.process_set_included_op()  # -> 1
    """
    return emit("process_set_included", process_set_id=process_set_id, name=name)
