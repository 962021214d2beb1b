"""Runs an operation on TensorFlow tensors: at once in eager mode, as a node while a graph is built."""

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from horoplug.common import dtypes
from horoplug.common.arguments import check_mask, checked, not_a_tensor
from horoplug.common.opspec import BY_NAME, Call
from horoplug.tensorflow import xla
from horoplug.tensorflow.library import OPS, runs_concurrently

UPDATES: Final = "horoplug_updates"
"""A graph's collection of operations for which those of horoplug wait that are added later."""


_COMPOSITES: Final = {
    tf.RaggedTensor: "pass x.to_tensor(), or its flat_values and row_lengths() in operations of their own",
    tf.sparse.SparseTensor: "pass tf.sparse.to_dense(x)",
}
"""What TensorFlow does not convert to a dense tensor, and what to pass instead."""


def to_tensor(value: Any) -> tf.Tensor:
    """A dense tensor of a dtype that the core supports.

    Raises TypeError for a value that is no tensor, ValueError for a dtype that is not supported."""
    # In eager mode a tensor needs no conversion, which would cost more than all else here.
    is_tensor = isinstance(value, tf.Tensor) and tf.executing_eagerly()
    tensor = value if is_tensor else _converted(value)
    if not _is_supported(tensor.dtype):
        raise dtypes.unsupported(tensor.dtype.name, dtypes.NAMES)
    return tensor


@functools.cache
def _is_supported(dtype: tf.DType) -> bool:
    return dtype.base_dtype.name in dtypes.CODES


def _converted(value: Any) -> tf.Tensor:
    check_mask(value)
    for kind, remedy in _COMPOSITES.items():
        if isinstance(value, kind):
            raise TypeError(f"expected a dense tensor, got a {kind.__name__}; {remedy}")
    if value is None or isinstance(value, (dict, set)):
        raise not_a_tensor("a tensor", value, "tf.convert_to_tensor")
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:  # their texts may have several lines
        text = " ".join(str(error).split())
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the {type(value).__name__} cannot be made a tensor: {text}") from None


def run(
    operation: str,
    tensors: Sequence[tf.Tensor],
    call: Call,
    *,
    grouped: bool = False,
    ignore_name_scope: bool = False,
) -> Any:
    """The outputs of an operation (a row of ``horoplug.common.opspec``) on one tensor, or on a group of one dtype.

    In a graph the ranks match operations by the names of the nodes. In eager mode they match them by ``call.name``, or
    by the order of the calls without a name."""
    call = checked(BY_NAME[operation], call)
    function = f"grouped_{operation}" if grouped else operation
    arguments: dict[str, Any] = {"process_set_id": call.process_set}
    arguments |= {"tensors": tensors} if grouped else {"tensor": tensors[0]}
    if operation in ("allreduce", "reducescatter"):
        arguments["reduce_op"] = call.reduce_op
        # As text: attributes of type float have 32 bits, which is not precise enough.
        arguments["prescale_factor"] = repr(float(call.prescale))
        arguments["postscale_factor"] = repr(float(call.postscale))
        if operation == "allreduce":
            arguments["wire_dtype"] = call.wire_dtype
    elif operation == "allgather" and call.layout and not xla.is_compiling():
        arguments["layout"] = call.layout
    elif operation == "broadcast":
        arguments["root_rank"] = call.root
    elif operation == "alltoall":
        splits = [] if call.splits is None else call.splits
        try:
            arguments["splits"] = tf.convert_to_tensor(splits, tf.int32)
        except (TypeError, ValueError):
            raise ValueError("splits= takes one integer (int32) for each rank") from None
    if tf.executing_eagerly():
        arguments |= {"tensor_name": call.name or "", "blocking": True}
    else:
        runs_concurrently()  # must be called before a graph with operations is complete
        node = _node_name(call.name or f"{function}_{tensors[0].name}")
        arguments["name"] = node
        # The ranks match operations by the given name, not by the name of the node.
        if call.name and node != call.name:
            arguments["tensor_name"] = call.name
        arguments["ignore_name_scope"] = ignore_name_scope
    return emit(function, **arguments)


def emit(function: str, **arguments: Any) -> Any:
    """Call ``horovod_<function>``, or emit a custom call in a function that XLA compiles."""
    operation = getattr(OPS, f"horovod_{function}")
    if tf.executing_eagerly():
        return operation(**arguments)
    if xla.is_compiling():
        return xla.emit(function, arguments)
    graph = tf.compat.v1.get_default_graph()
    # The graphs of branches and functions inherit collections.
    updates = [op for op in graph.get_collection(UPDATES) if op.graph is graph]
    with tf.control_dependencies(updates):
        return operation(**arguments)


def _node_name(name: str) -> str:
    """A valid name of a graph node."""
    legal = re.sub(r"[^A-Za-z0-9_./>-]", "_", name)
    return legal if re.match(r"[A-Za-z0-9.]", legal) else f"horovod_{legal}"


def rank_in(process_set: int) -> tf.Tensor:
    """This rank's rank in a process set, as an int32 scalar that is evaluated when the graph runs."""
    return emit("rank", process_set_id=process_set)


def size_of(process_set: int) -> tf.Tensor:
    """The number of ranks in a process set, as an int32 scalar that is evaluated when the graph runs."""
    return emit("size", process_set_id=process_set)
