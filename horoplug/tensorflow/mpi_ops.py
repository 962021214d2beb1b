"""All operations on TensorFlow's tensors. (The module's name is Horovod's; there is no MPI in it.)

They run eagerly, inside of ``tf.function``, and while a graph of TensorFlow 1 is built. In a graph any number of them
is in flight at once, in whatever order the ranks come to them. Errors are TensorFlow's: FailedPreconditionError if the
ranks disagree or ``init`` was not called, InvalidArgumentError for what this rank alone has wrong, UnknownError if the
job is broken (a rank is gone, a time limit has passed).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horoplug.common import calls
from horoplug.common.api import *  # noqa: F403
from horoplug.common.compression import pack
from horoplug.common.opspec import BY_NAME, Call
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import NAMES, Average, Sum
from horoplug.tensorflow import gradients as gradients
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.library import as_written
from horoplug.tensorflow.nodes import emit, run, size_of

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
    tensors, wire, unpack = pack(
        compression, [tf.convert_to_tensor(tensor)], BY_NAME[operation].casts
    )
    call = call._replace(wire_dtype=wire)
    return unpack([run(operation, tensors, call, ignore_name_scope=ignore_name_scope)])[0]


def _by_dtype(
    operation: str, tensors: Sequence[Any], call: Call, ignore_name_scope: bool = False
) -> list[list[tf.Tensor]]:
    """The outputs of a grouped operation, for each tensor, on one group for each dtype."""
    if not isinstance(tensors, (list, tuple)):  # a tensor would be taken row by row
        raise TypeError(
            f"grouped_{operation} takes a list of tensors, got {type(tensors).__name__}."
        )
    if not tensors:
        raise ValueError(f"grouped_{operation} needs at least one tensor.")
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    places: dict[tf.DType, list[int]] = {}
    for place, tensor in enumerate(converted):
        places.setdefault(tensor.dtype, []).append(place)
    outputs: dict[int, list[tf.Tensor]] = {}
    for dtype, of_dtype in places.items():
        name = call.name
        if name and len(places) > 1:
            name = f"{name}.{dtype.name}"
        part = [converted[place] for place in of_dtype]
        result = run(
            operation,
            part,
            call._replace(name=name),
            grouped=True,
            ignore_name_scope=ignore_name_scope,
        )
        lists = result if isinstance(result, tuple) else (result,)
        for index, place in enumerate(of_dtype):
            outputs[place] = [values[index] for values in lists]
    return [outputs[place] for place in range(len(tensors))]


def _reduce_group(
    operation: str, tensors: Sequence[Any], call: Call, compression: Any, ignore_name_scope: bool
) -> list[tf.Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(
            f"grouped_{operation} takes a list of tensors, got {type(tensors).__name__}."
        )
    converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
    packed, wire, unpack = pack(compression, converted, BY_NAME[operation].casts)
    call = call._replace(wire_dtype=wire)
    results = _by_dtype(operation, packed, call, ignore_name_scope)
    return unpack(result for (result,) in results)


def _allreduce_slices(
    slices: tf.IndexedSlices, call: Call, compression: Any, ignore_name_scope: bool
) -> tf.IndexedSlices:
    if call.reduce_op not in (Average, Sum):
        raise NotImplementedError(
            f"allreduce of tf.IndexedSlices knows op=Average and op=Sum, not {NAMES[call.reduce_op]}; "
            "make a dense tensor of it with tf.convert_to_tensor."
        )
    if call.prescale != 1.0 or call.postscale != 1.0:
        raise NotImplementedError(
            "allreduce of tf.IndexedSlices has no prescale_factor and postscale_factor; make a dense tensor of it "
            "with tf.convert_to_tensor."
        )
    gathering = Call(process_set=call.process_set)

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


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor of one shape over all ranks, element by element; every rank gets the result. Differentiable.

    A ``tf.IndexedSlices`` is reduced by gathering the ranks' slices (Average and Sum only, without factors); the result
    is one, in which indices can be more than once. ``name`` pairs the calls of the ranks. ``device_dense``,
    ``device_sparse``: where to place the operation. ``compression`` is taken from :class:`Compression`."""
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        with _device(device_sparse):
            return _allreduce_slices(tensor, call, compression, ignore_name_scope)
    with _device(device_dense):
        return _reduce("allreduce", tensor, call, compression, ignore_name_scope)


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """:func:`allreduce` of a list of tensors, which are done together or not at all. ``tf.IndexedSlices`` among them
    are reduced each by itself."""
    call = calls.allreduce(average, name, op, prescale_factor, postscale_factor, process_set)
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"grouped_allreduce takes a list of tensors, got {type(tensors).__name__}.")
    results: dict[int, Any] = {}
    with _device(device_sparse):
        for place, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                part = call._replace(name=name and f"{name}.{place}")
                results[place] = _allreduce_slices(tensor, part, compression, ignore_name_scope)
    dense = [place for place in range(len(tensors)) if place not in results]
    if dense or not tensors:
        with _device(device_dense):
            reduced = _reduce_group(
                "allreduce", [tensors[i] for i in dense], call, compression, ignore_name_scope
            )
        results.update(zip(dense, reduced, strict=True))
    return [results[place] for place in range(len(tensors))]


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Join the ranks' tensors along the first dimension, which may differ between ranks, in rank order; a scalar counts
    as one row. Differentiable."""
    call = calls.allgather(name, process_set)
    converted = tf.convert_to_tensor(tensor)
    return run("allgather", [converted], call, ignore_name_scope=ignore_name_scope)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """:func:`allgather` of a list of tensors, which are done together or not at all."""
    call = calls.allgather(name, process_set)
    return [output for output, _ in _by_dtype("allgather", tensors, call, ignore_name_scope)]


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Give every rank the tensor of rank `root_rank` (a global rank); shapes are the same on all ranks.
    Differentiable."""
    call = calls.broadcast(root_rank, name, process_set)
    converted = tf.convert_to_tensor(tensor)
    return run("broadcast", [converted], call, ignore_name_scope=ignore_name_scope)


@as_written
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables (of TensorFlow or Keras) with those of rank `root_rank` (a global rank); returns what their
    ``assign`` does. In a graph nothing happens before these run."""
    values = [tf.convert_to_tensor(variable) for variable in variables]
    received = [
        broadcast(value, root_rank, f"{name or 'broadcast_'}.{place}", process_set=process_set)
        for place, value in enumerate(values)
    ]
    return [variable.assign(value) for variable, value in zip(variables, received, strict=True)]


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows (first dimension) to rank i, taken in order, and join what arrives in rank order; rows
    beyond the splits stay here. Without `splits`, equal parts. Given `splits` (int32, one for each rank), the result is
    (output, rows received from each rank). Differentiable."""
    call = calls.alltoall(splits, name, process_set)
    converted = tf.convert_to_tensor(tensor)
    output, received = run("alltoall", [converted], call, ignore_name_scope=ignore_name_scope)
    return output if splits is None else (output, received)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce like :func:`allreduce` (Average or Sum only), then keep this rank's share of the rows (first dimension);
    the first `rows % size` ranks get one more. Differentiable."""
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    with _device(device_dense):
        return _reduce("reducescatter", tensor, call, compression, ignore_name_scope)


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """:func:`reducescatter` of a list of tensors, which are done together or not at all."""
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    with _device(device_dense):
        return _reduce_group("reducescatter", tensors, call, compression, False)


@as_written
def join(process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Say that this rank has no more data, and wait until every rank of the set has; returns the (global) rank that was
    the last, as an int32 scalar. See :func:`horoplug.common.variants.join`."""
    return emit("join", process_set_id=process_set_id(process_set), blocking=tf.executing_eagerly())


@as_written
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Wait until every rank of the process set is here. In a graph of TensorFlow 1: returns the operation."""
    waiting = emit(
        "barrier", process_set_id=process_set_id(process_set), blocking=tf.executing_eagerly()
    )
    # Functions that are compiled can return tensors only.
    return None if tf.inside_function() else waiting


# Numbers that are looked up when a graph runs, so that it can be used in another job.


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in a process set, as an int32 scalar."""
    return emit("size", process_set_id=process_set_id, name=name)


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host, as an int32 scalar."""
    return emit("local_size", name=name)


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """This rank's number, as an int32 scalar."""
    return emit("rank", name=name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This rank's number on its host, as an int32 scalar."""
    return emit("local_rank", name=name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set, 0 or 1, as an int32 scalar."""
    return emit("process_set_included", process_set_id=process_set_id, name=name)
