"""Runs an operation on TensorFlow tensors: at once in eager mode, as a node while a graph is built."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.opspec import Call
from horoplug.tensorflow import xla
from horoplug.tensorflow.library import OPS, runs_concurrently, starts_first


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
    elif operation == "broadcast":
        arguments["root_rank"] = call.root
    elif operation == "alltoall":
        splits = [] if call.splits is None else call.splits
        arguments["splits"] = tf.convert_to_tensor(splits, tf.int32)
    if tf.executing_eagerly():
        arguments |= {"tensor_name": call.name or "", "blocking": True}
    else:
        runs_concurrently()  # must be called before a graph with operations is complete
        node = _node_name(call.name or f"{function}_{tensors[0].name}")
        arguments["name"] = node
        if call.name and node != call.name:  # the ranks match the name that was given
            arguments["tensor_name"] = call.name
        arguments["ignore_name_scope"] = ignore_name_scope
        if starts_first() and not xla.is_compiling():
            return _started(function, arguments)
    return emit(function, **arguments)


def emit(function: str, **arguments: Any) -> Any:
    """Call ``horovod_<function>``, or emit a custom call in a function that XLA compiles."""
    if not tf.executing_eagerly() and xla.is_compiling():
        return xla.emit(function, arguments)
    return getattr(OPS, f"horovod_{function}")(**arguments)


def _started(function: str, arguments: dict[str, Any]) -> Any:
    """Emit an operation where kernels cannot return early: nodes that start it, wait until it has ended, and take the
    results. The second one is TensorFlow's: it waits for an element of a queue, without keeping a thread. So operations
    run concurrently, and ranks may have them in different orders."""
    graph = tf.compat.v1.get_default_graph()
    node = graph.unique_name(arguments.pop("name"))
    common = dict(arguments)
    tensors = common.pop("tensors", None) or [common.pop("tensor")]
    common.setdefault("splits", tf.constant([], tf.int32))
    common.setdefault("reduce_op", 0)
    common.setdefault("root_rank", 0)
    row = "Horovod" + "".join(part.capitalize() for part in function.split("_"))
    # A slash at the end: the name is complete. HorovodStart knows by its own name that of the node with the results.
    name = f"horoplug/{node}"
    start = OPS.horovod_start(tensors=tensors, row=row, queue=name, name=f"{node}_start/", **common)
    queue = tf.raw_ops.FIFOQueueV2(
        component_types=[tf.int32], shapes=[[]], shared_name=name, name=f"{node}_queue/"
    )
    with tf.control_dependencies([start]):
        (ended,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])
    with tf.control_dependencies([ended]):
        return getattr(OPS, f"horovod_{function}")(name=f"{node}/", **arguments)


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
