"""Functions of ``horovod.tensorflow`` with a leading underscore, which programs import."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common import calls
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Sum
from horoplug.tensorflow import gradients, mpi_ops
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.gradient_tape import _DistributedTape as _DistributedGradientTape

__all__ = ["_DistributedGradientTape"]

_global_variables = tf.compat.v1.global_variables
_get_default_graph = tf.compat.v1.get_default_graph
_SessionRunHook = tf.compat.v1.train.SessionRunHook

# ---- horovod.tensorflow ----------------------------------------------------------------------------------------------


def _if_included(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which returns its input on a rank outside of the process set."""

    def call(
        given: Any, *args: Any, process_set: ProcessSet = global_process_set, **options: Any
    ) -> Any:
        if not process_set.included():
            return given
        return operation(given, *args, process_set=process_set, **options)

    return call


_allreduce_cond = _if_included(mpi_ops.allreduce)
_grouped_allreduce_cond = _if_included(mpi_ops.grouped_allreduce)


# ---- horovod.tensorflow.mpi_ops: the operations below the public ones, whose default is the sum ---------------------


def _in_order(function: Callable[..., Any], order: str) -> Callable[..., Any]:
    """A function with its arguments in this order, and the sum as the default."""
    names = order.split()

    def call(*args: Any, **options: Any) -> Any:
        given = dict(zip(names[: len(args)], args, strict=True))
        return function(**{"op": Sum, **given, **options})

    return call


_FACTORS = "prescale_factor postscale_factor"
_allreduce = _in_order(
    mpi_ops.allreduce, f"tensor name op {_FACTORS} ignore_name_scope process_set"
)
_grouped_allreduce = _in_order(
    mpi_ops.grouped_allreduce, f"tensors name op {_FACTORS} ignore_name_scope process_set"
)
_reducescatter = _in_order(
    mpi_ops.reducescatter, f"tensor name op ignore_name_scope process_set {_FACTORS}"
)


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    call = calls.reducescatter(name, op, process_set, prescale_factor, postscale_factor)
    return mpi_ops._reduce_group(
        "reducescatter", tensors, call, Compression.none, ignore_name_scope
    )


def _normalize_name(name: str) -> str:
    """The name with an underscore for each character that TensorFlow does not allow in names."""
    return re.sub("[^a-zA-Z0-9_]", "_", name)


# The gradients of the operations, as functions of the operation and the gradients of its outputs.


def _grouped_gradient(op: Any, *grads: Any) -> list[Any]:
    return gradients.gradient(op, *grads)


def _gradient(op: Any, *grads: Any) -> Any:
    (gradient,) = gradients.gradient(op, *grads)
    return gradient


_alltoall_grad = _grouped_gradient  # also one for the splits
_allreduce_grad = _allgather_grad = _broadcast_grad = _reducescatter_grad = _gradient
_grouped_allreduce_grad = _grouped_allgather_grad = _grouped_gradient
_grouped_reducescatter_grad = _grouped_gradient

# ---- horovod.tensorflow.functions ------------------------------------------------------------------------------------

Broadcast = Callable[[Sequence[Any], int, ProcessSet], Any]


def _broadcast(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> Any:
    assigned = mpi_ops.broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


def _make_broadcast_group_fn() -> Broadcast:
    """A function that overwrites variables by those of a rank; in a graph, it returns the operation."""
    return _broadcast


def _broadcast_lists(
    lists: Sequence[Sequence[Any]], root_rank: int, process_set: ProcessSet
) -> Any:
    return _broadcast([variable for each in lists for variable in each], root_rank, process_set)


def _make_inplace_broadcast_group_fn() -> Broadcast:
    """As :func:`_make_broadcast_group_fn`, for several lists of variables."""
    return _broadcast_lists


# ---- horovod.tensorflow.gradient_aggregation -------------------------------------------------------------------------


def apply_op_to_not_none_tensors(
    tensor_op: Callable[..., Any], tensors: Sequence[Any], *args: Any
) -> list[Any]:
    """Call a function with each tensor and ``args``. None stays None."""
    return [None if tensor is None else tensor_op(tensor, *args) for tensor in tensors]


def get_not_none_from_list(tensor_list: Sequence[Any]) -> list[Any]:
    """The items that are not None."""
    return [each for each in tensor_list if each is not None]
