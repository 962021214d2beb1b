"""Operations in functions that XLA compiles (``tf.function(jit_compile=True)``).

TensorFlow's kernels cannot run there. Each operation is a custom call of the compiled program instead
(``csrc/bindings/tensorflow/xla.h``), which blocks the program. XLA runs calls that do not depend on each other in any
order, or concurrently, so that ranks could wait for each other. Therefore every call takes a token from the call before
it and passes one on. The token is the value of a variable, because XLA carries variables through loops and
branches. Calls that one thread traces run in the order in which they were traced.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import tensorflow as tf

from horoplug.tensorflow.library import OPS, do_not_convert, register_xla

try:
    from tensorflow.python.framework.func_graph import FuncGraph as _FunctionGraph
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext as _in_xla
except ImportError:
    _in_xla = _FunctionGraph = None

# For operations whose output has another shape: the number of output rows, from the numbers of input rows and of ranks.
_ROWS: Final[dict[str, Callable[[int, int], int]]] = {
    "allgather": lambda rows, ranks: rows * ranks,
    "alltoall": lambda rows, ranks: rows,
    "reducescatter": lambda rows, ranks: rows // ranks,
}
_SPLITS_ROWS: Final = ("alltoall", "reducescatter")
# The dtype of the second output, the number of rows received from each rank.
_COUNT_DTYPES: Final = {"allgather": tf.int64, "alltoall": tf.int32}
_QUERIES: Final = ("size", "local_size", "rank", "local_rank", "process_set_included")

# TensorFlow's reserved name for a variable that is deleted with its handle.
_ANONYMOUS: Final = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
# Attributes that are added to graphs: the program that contains the graph, and the last operation of the last call.
_PROGRAM: Final = "_horoplug_program"
_LAST: Final = "_horoplug_last"

# By the type of the operation: a function of the operation and the gradients of its outputs.
_GRADIENTS: Final[dict[str, Callable[..., list[Any]]]] = {}


def register_gradient(kind: str, gradient: Callable[..., list[Any]]) -> None:
    """Set the gradient function of the operation ``kind`` in compiled functions; ``tf.RegisterGradient`` does so
    elsewhere."""
    _GRADIENTS[kind] = gradient


def is_compiling() -> bool:
    """Whether the function that is being traced will be compiled by XLA."""
    return _in_xla is not None and _in_xla(tf.compat.v1.get_default_graph())


@functools.cache
def problem() -> str:
    """Why compiled functions cannot contain operations, or an empty string."""
    missing = register_xla()
    if missing:
        return f"TensorFlow {tf.__version__} lacks {missing}"
    return "" if _custom_call() else f"TensorFlow {tf.__version__} lacks xla_custom_call_v2"


def _device_problem() -> str:
    """Why a function on the current device cannot contain operations, or an empty string. The custom call is
    implemented for CPUs only."""
    with tf.init_scope():
        device = tf.identity(tf.constant(0.0)).device
    on_host = tf.DeviceSpec.from_string(device).device_type in (None, "CPU")
    return "" if on_host else f"it runs on {device}, and not on a CPU"


def _custom_call() -> Any:
    try:
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops
    except ImportError:
        return None
    return getattr(gen_xla_ops, "xla_custom_call_v2", None)


def refuse(operation: str, reason: str) -> NoReturn:
    """Raises NotImplementedError: an operation cannot be in a compiled function."""
    raise NotImplementedError(
        f"horoplug's {operation} cannot be in a function that XLA compiles: {reason}. Use jit_compile=False, or call "
        "it outside of the compiled function"
    )


@do_not_convert
def emit(function: str, arguments: dict[str, Any]) -> Any:
    """The outputs of the operation ``horovod_<function>`` for these arguments, from a custom call.

    Raises NotImplementedError for calls that cannot be compiled, and ValueError for tensors whose shapes are not known
    when the function is traced."""
    operation = function.removeprefix("grouped_")
    reason = problem() or _device_problem()
    if reason:
        refuse(operation, reason)
    if operation == "join":
        refuse(operation, "ranks that have joined no longer run the program")
    if operation in _QUERIES:
        return _call(_text(function, arguments, [], [], ""), [], [tf.int32], [[]], effect=False)[0]
    is_grouped = function != operation
    one = [arguments["tensor"]] if "tensor" in arguments else []
    tensors = arguments["tensors"] if is_grouped else one
    op = _CustomCallOp(function, arguments, tensors)
    results, counts = _results(operation, tensors, arguments)
    text = _text(function, arguments, tensors, results, _name(arguments))
    outputs = _ordered(op, text, results, counts)
    if operation == "barrier":
        return None
    if is_grouped:
        return (outputs, counts) if counts else outputs
    return (outputs[0], counts[0]) if counts else outputs[0]


class _CustomCallOp:
    """A custom call with the interface of a ``tf.Operation``, for the gradient functions."""

    def __init__(
        self, function: str, arguments: dict[str, Any], inputs: Sequence[tf.Tensor]
    ) -> None:
        self.type = _kind(function)
        self.inputs = inputs
        self.outputs: list[tf.Tensor] = []
        self._attributes = {"num_tensors": len(inputs), "tensor_name": ""} | arguments

    def get_attr(self, name: str) -> Any:
        value = self._attributes[name]
        return value.encode() if isinstance(value, str) else value


def _kind(function: str) -> str:
    """The type of an operation in TensorFlow."""
    return "Horovod" + "".join(part.capitalize() for part in function.split("_"))


def _name(arguments: dict[str, Any]) -> str:
    """The name by which the ranks match the operation, the same as outside of a compiled function."""
    if "name" not in arguments:
        return ""
    node: str = tf.compat.v1.get_default_graph().unique_name(arguments["name"])
    if arguments["ignore_name_scope"]:
        node = node.rsplit("/", 1)[-1]
    return arguments.get("tensor_name") or node


def _text(
    function: str,
    arguments: dict[str, Any],
    tensors: Sequence[tf.Tensor],
    results: Sequence[Sequence[int]],
    name: str,
) -> str:
    words: list[Any] = [
        _kind(function),
        arguments.get("reduce_op", 0),
        arguments.get("root_rank", 0),
        arguments.get("process_set_id", 0),
        arguments.get("prescale_factor", "1"),
        arguments.get("postscale_factor", "1"),
        arguments.get("wire_dtype", 0),
        tensors[0].dtype.as_datatype_enum if tensors else 0,
        len(tensors),
    ]
    for tensor, result in zip(tensors, results, strict=True):
        words += [len(tensor.shape), *tensor.shape, result[0] if result else -1]
    return " ".join(map(str, [*words, name]))


def _results(
    operation: str, tensors: Sequence[tf.Tensor], arguments: dict[str, Any]
) -> tuple[list[list[int]], list[tf.Tensor]]:
    """The shapes of the outputs, and the row counts of operations that return them."""
    shapes = [_shape_of(operation, tensor) for tensor in tensors]
    if operation not in _ROWS:
        return shapes, []
    with tf.init_scope():
        ranks = int(OPS.horovod_size(process_set_id=arguments["process_set_id"]))
    results, counts = [], []
    for shape in shapes:
        rows = shape[0] if shape else 1
        if operation in _SPLITS_ROWS and rows % ranks:
            refuse(operation, f"{rows} rows cannot be divided among {ranks} ranks")
        results.append([_ROWS[operation](rows, ranks), *shape[1:]])
        if operation in _COUNT_DTYPES:
            each = rows // ranks if operation in _SPLITS_ROWS else rows
            counts.append(tf.constant([each] * ranks, _COUNT_DTYPES[operation]))
    if operation == "alltoall":
        splits = tf.get_static_value(arguments["splits"])
        if splits is None or (splits.size and splits.tolist() != [rows // ranks] * ranks):
            refuse(operation, "its splits are not equal parts")
    return results, counts


def _shape_of(operation: str, tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"horoplug's {operation} in a function that XLA compiles needs tensors whose shapes are known when the "
            f"function is traced, got {tensor.shape} for {tensor.name}. Use tf.ensure_shape, or jit_compile=False"
        )
    shape: list[int] = tensor.shape.as_list()
    return shape


def _ordered(
    op: _CustomCallOp, text: str, results: list[list[int]], counts: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The outputs of a differentiable call that runs after the calls before it."""

    def call(token: tf.Tensor, *tensors: tf.Tensor) -> Any:
        types = [*(tensor.dtype for tensor in tensors), token.dtype]
        made = _call(text, [*tensors, token], types, [*results, []])
        op.inputs, op.outputs = tensors, [*made[:-1], *counts]

        def gradient(*grads: tf.Tensor) -> list[Any]:
            of_inputs = _GRADIENTS[op.type](op, *grads[: len(tensors)])
            return [None, *of_inputs[: len(tensors)]]

        return tuple(made), gradient

    order = _variable(graph := tf.compat.v1.get_default_graph())
    # tf.function adds these control dependencies itself, but not in gradients of loops.
    with tf.control_dependencies(
        [last for last in [getattr(graph, _LAST, None)] if last is not None]
    ):
        token = tf.raw_ops.ReadVariableOp(resource=order, dtype=tf.int32)
    made = tf.custom_gradient(call)(token, *op.inputs)
    *outputs, after = made if isinstance(made, (list, tuple)) else [made]
    setattr(graph, _LAST, tf.raw_ops.AssignVariableOp(resource=order, value=after))
    with tf.control_dependencies([getattr(graph, _LAST)]):
        return [tf.identity(output) for output in outputs]


def _call(
    text: str,
    operands: Sequence[tf.Tensor],
    types: Sequence[tf.DType],
    shapes: Sequence[Sequence[int]],
    effect: bool = True,
) -> list[tf.Tensor]:
    made: list[tf.Tensor] = _custom_call()(
        operands=operands,
        call_target_name="horoplug",
        backend_config=text,
        has_side_effect=effect,
        result_dtypes=types,
        result_shapes=shapes,
    )
    return made


class _Program:
    """The functions that are compiled together, or called from one such function. Their calls are ordered."""

    @functools.cached_property
    def order(self) -> tf.Tensor:
        """The handle of the variable that holds the token."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                refuse("operation", "it is in a graph of TensorFlow 1")
            # Not a tf.Variable, which a tf.function may create only in its first call.
            handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=_ANONYMOUS)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
        return handle

    def RequiresUniqueFunctionRetracing(self) -> bool:
        """Called by TensorFlow, see :func:`_trace_per_program`."""
        return True


def _program() -> _Program | None:
    """The program that is being traced."""
    graph, graphs = tf.compat.v1.get_default_graph(), []
    while hasattr(graph, "outer_graph") and _in_xla(graph):
        graphs.append(graph)
        graph = graph.outer_graph
    if not graphs:
        return None
    program: _Program = getattr(graphs[-1], _PROGRAM, None) or _Program()
    for graph in graphs:  # any of them may outlive the others
        setattr(graph, _PROGRAM, program)
    return program


def _variable(graph: Any) -> tf.Tensor:
    """The handle of the program's variable, captured by one of its graphs."""
    program = _program()
    if program is None:
        refuse("operation", "it is in a graph of TensorFlow 1")
    order = program.order
    if type(graph) is not _FunctionGraph:
        # The graph is a loop or a branch. The gradient of a loop can only use captures of the surrounding graph.
        with graph.outer_graph.as_default():
            order = _variable(graph.outer_graph)
    captured: tf.Tensor = graph.capture(order)
    return captured


def _trace_per_program() -> None:
    """Patch TensorFlow to trace a ``tf.function`` again for each program that XLA compiles.

    Otherwise TensorFlow would reuse a wrong trace: one from outside of compiled functions, which XLA cannot compile;
    one with custom calls, outside of compiled functions; or one with the variable of another program."""
    try:
        from tensorflow.python.eager.polymorphic_function import function_context
    except ImportError:
        return
    original = getattr(function_context, "_enclosing_xla_context", None)
    if original is None or _in_xla is None:
        return

    def enclosing() -> Any:
        context = original()
        if context is None or context.RequiresUniqueFunctionRetracing():
            return context
        return _program() or context

    function_context._enclosing_xla_context = enclosing


_trace_per_program()
