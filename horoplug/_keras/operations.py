"""Operations on values: tensors and variables of the Keras backends, whose results are tensors, and NumPy arrays,
numbers and lists, whose results are NumPy arrays."""

from typing import Any

import numpy as np

import horoplug.numpy
from horoplug._keras import backends
from horoplug._keras.functions import broadcast_variables, weights
from horoplug.common.arguments import check_mask
from horoplug.common.compression import AnyCompressor
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average, resolve

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter"]


def _run(operation: str, value: Any, compression: Any = None, **options: Any) -> Any:
    """Run an operation of the framework to which the value belongs, or of ``horoplug.numpy``."""
    if hasattr(value, "assign") and hasattr(value, "constraint"):  # a Keras variable
        value = getattr(value, "value", value)
        value = value() if callable(value) else value
    backend = backends.of(value)
    if backend is None:
        check_mask(value)
        return getattr(horoplug.numpy, operation)(np.asarray(value), **options)
    if compression is not None:
        options["compression"] = compression
    return getattr(backend, operation)(value, **options)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: AnyCompressor | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value of one shape over all ranks, element by element; every rank gets the result.

    ``value``: a tensor or a variable of the Keras backend, for which the result is a tensor; or a NumPy array, a number
        or a list, for which the result is a NumPy array. It has the same shape and dtype on all ranks.
    ``name``: pairs the calls of the ranks.
    ``average``: deprecated; True means op=Average, False means op=Sum.
    ``prescale_factor``, ``postscale_factor``: factors for each rank's value before the reduction, and for the result.
    ``op``: Average (the default), Sum, Adasum, Min, Max or Product.
    ``compression``: such as ``Compression.fp16``; applies to tensors and variables only.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises TypeError or ValueError for what is invalid on this rank. If the ranks disagree or a rank has failed, raises
    HorovodInternalError, or for tensors of TensorFlow tf.errors.FailedPreconditionError or UnknownError.

    Example, on two ranks:

        x = np.array([1.0 + hvd.rank(), 2.0])
        hvd.allreduce(x, op=hvd.Sum)  # -> [3.0, 4.0]
        hvd.allreduce(keras.ops.convert_to_tensor([1.0 + hvd.rank()]))  # -> [1.5]
    """
    return _run(
        "allreduce",
        value,
        compression,
        name=name,
        op=resolve(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' values along the first dimension, which may differ between ranks, in rank order; a scalar
    counts as one row.

    ``value``: a tensor, a variable, a NumPy array, a number or a list, as for :func:`allreduce`, of the same dtype on
        all ranks. The result has this dtype.
    ``name``: pairs the calls of the ranks.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises TypeError or ValueError for what is invalid on this rank. If the ranks disagree or a rank has failed, raises
    HorovodInternalError, or for tensors of TensorFlow tf.errors.FailedPreconditionError or UnknownError.

    Example, on two ranks:

        hvd.allgather(np.array([1.0 + hvd.rank()]))  # -> [1.0, 2.0]
    """
    return _run("allgather", value, name=name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the value of rank `root_rank` (a global rank) on every rank. Shapes are the same on all ranks.

    ``value``: a tensor, a variable, a NumPy array, a number or a list, as for :func:`allreduce`, of the same shape and
        dtype on all ranks.
    ``name``: pairs the calls of the ranks.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises TypeError or ValueError for what is invalid on this rank. If the ranks disagree or a rank has failed, raises
    HorovodInternalError, or for tensors of TensorFlow tf.errors.FailedPreconditionError or UnknownError.

    Example, on two ranks:

        hvd.broadcast(np.array([1.0 + hvd.rank(), 2.0]), root_rank=0)  # -> [1.0, 2.0]
    """
    return _run("broadcast", value, root_rank=root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce like :func:`allreduce` (Average or Sum only) and return this rank's share of the rows (first dimension).
    The first `rows % size` ranks get one row more than the others.

    ``value``: a tensor, a variable, a NumPy array, a number or a list, as for :func:`allreduce`, of the same shape and
        dtype on all ranks. The result has this dtype.
    ``op``: Average (the default) or Sum.
    ``name``: pairs the calls of the ranks.
    ``process_set``: the ranks that take part; by default all ranks of the job.

    Raises TypeError or ValueError for what is invalid on this rank. If the ranks disagree or a rank has failed, raises
    HorovodInternalError, or for tensors of TensorFlow tf.errors.FailedPreconditionError or UnknownError.

    Example, on two ranks:

        x = np.array([1.0 + hvd.rank(), 2.0])
        hvd.reducescatter(x, op=hvd.Sum)  # -> [3.0] on rank 0, [4.0] on rank 1
    """
    return _run("reducescatter", value, name=name, op=op, process_set=process_set)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Overwrite the weights of a model and the variables of its optimizer with those of rank `root_rank`. Collective.

    Raises ValueError without ``model``, because Keras has no list of all variables.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.layers[0].kernel.assign([[5.0 + hvd.rank()]])
        hvd.broadcast_global_variables(0, model)
        model.layers[0].kernel  # -> [[5.0]]
    """
    if model is None:
        raise ValueError(
            "broadcast_global_variables needs the model: call broadcast_global_variables(0, model), or pass the "
            "callback BroadcastGlobalVariablesCallback(0) to fit"
        )
    broadcast_variables(weights(model), root_rank)
