"""Operations in functions that XLA compiles (``tf.function(jit_compile=True)``).

TensorFlow's kernels cannot run there: each operation becomes a custom call of the compiled program instead
(``csrc/bindings/tensorflow/xla.h``), which blocks the program. XLA runs calls that do not need each other in any order,
also side by side, so that ranks could wait for each other. Hence every call takes a token from the one before it and
hands one on, by way of a variable: that is what XLA carries through loops and branches too. What is traced by one
thread runs in the order in which it was traced.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import tensorflow as tf

from horoplug.tensorflow.library import OPS, as_written, prepare_xla

try:
    from tensorflow.python.framework.func_graph import FuncGraph as _FunctionGraph
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext as _in_xla
except ImportError:
    _in_xla = _FunctionGraph = None

# The rows of an operation's output, where it is not like the input, from the input's and the number of ranks.
_ROWS: Final[dict[str, Callable[[int, int], int]]] = {
    "allgather": lambda rows, ranks: rows * ranks,
    "alltoall": lambda rows, ranks: rows,
    "reducescatter": lambda rows, ranks: rows // ranks,
}
_DIVIDED: Final = ("alltoall", "reducescatter")
# The dtype of the rows that came from each rank, where they are an output.
_COUNTS: Final = {"allgather": tf.int64, "alltoall": tf.int32}
_QUERIES: Final = ("size", "local_size", "rank", "local_rank", "process_set_included")

# TensorFlow's name for a variable that exists as long as its handle does.
_ANONYMOUS: Final = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
# Attributes that graphs get: the program they are part of, and the operation that ends the last call.
_PROGRAM: Final = "_horoplug_program"
_LAST: Final = "_horoplug_last"


def compiling() -> bool:
    """Whether what is traced now is for XLA."""
    return _in_xla is not None and _in_xla(tf.compat.v1.get_default_graph())


@functools.cache
def problem() -> str:
    """Why there can be no operations in compiled functions, or an empty string."""
    missing = prepare_xla()
    if missing:
        return f"TensorFlow {tf.__version__} lacks {missing}"
    return "" if _custom_call() else f"TensorFlow {tf.__version__} lacks xla_custom_call_v2"


def _placement() -> str:
    """Why there can be no operations in a function that runs where this one will, or an empty string: nobody has
    written the custom call for a GPU."""
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
        "it outside of the compiled function."
    )


@as_written
def emit(function: str, arguments: dict[str, Any]) -> Any:
    """What the operation ``horovod_<function>`` would return for these arguments, from a custom call.

    Raises NotImplementedError for what cannot be compiled, and ValueError for tensors whose shapes are not known when
    the function is traced."""
    operation = function.removeprefix("grouped_")
    reason = problem() or _placement()
    if reason:
        refuse(operation, reason)
    if operation == "join":
        refuse(operation, "ranks that have joined do not run the program any more")
    if operation in _QUERIES:
        return _call(_text(function, arguments, [], [], ""), [], [tf.int32], [[]], effect=False)[0]
    is_grouped = function != operation
    one = [arguments["tensor"]] if "tensor" in arguments else []
    tensors = arguments["tensors"] if is_grouped else one
    past = _Emitted(function, arguments, tensors)
    results, counts = _results(operation, tensors, arguments)
    text = _text(function, arguments, tensors, results, _name(arguments))
    outputs = _ordered(past, text, results, counts)
    if operation == "barrier":
        return None
    if is_grouped:
        return (outputs, counts) if counts else outputs
    return (outputs[0], counts[0]) if counts else outputs[0]


class _Emitted:
    """A custom call as the rules of ``gradients.py`` see operations of a graph."""

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
    """TensorFlow's name for an operation."""
    return "Horovod" + "".join(part.capitalize() for part in function.split("_"))


def _name(arguments: dict[str, Any]) -> str:
    """What the other ranks know the operation by, as it would be outside of a compiled function."""
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
    """The shapes of the outputs, and the rows that come from each rank where the operation tells them."""
    shapes = [_shape_of(operation, tensor) for tensor in tensors]
    if operation not in _ROWS:
        return shapes, []
    with tf.init_scope():
        ranks = int(OPS.horovod_size(process_set_id=arguments["process_set_id"]))
    results, counts = [], []
    for shape in shapes:
        rows = shape[0] if shape else 1
        if operation in _DIVIDED and rows % ranks:
            refuse(operation, f"{rows} rows cannot be divided among {ranks} ranks")
        results.append([_ROWS[operation](rows, ranks), *shape[1:]])
        if operation in _COUNTS:
            each = rows // ranks if operation in _DIVIDED else rows
            counts.append(tf.constant([each] * ranks, _COUNTS[operation]))
    if operation == "alltoall":
        splits = tf.get_static_value(arguments["splits"])
        if splits is None or (splits.size and splits.tolist() != [rows // ranks] * ranks):
            refuse(operation, "its splits are not equal parts")
    return results, counts


def _shape_of(operation: str, tensor: tf.Tensor) -> list[int]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"horoplug's {operation} in a function that XLA compiles needs tensors whose shapes are known when the "
            f"function is traced, got {tensor.shape} for {tensor.name}. Use tf.ensure_shape, or jit_compile=False."
        )
    shape: list[int] = tensor.shape.as_list()
    return shape


def _ordered(
    past: _Emitted, text: str, results: list[list[int]], counts: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The outputs of a call that comes after those before it, and can be differentiated."""
    from horoplug.tensorflow.gradients import differentiate  # which uses this module

    def call(token: tf.Tensor, *tensors: tf.Tensor) -> Any:
        types = [*(tensor.dtype for tensor in tensors), token.dtype]
        made = _call(text, [*tensors, token], types, [*results, []])
        past.inputs, past.outputs = tensors, [*made[:-1], *counts]

        def gradient(*grads: tf.Tensor) -> list[Any]:
            return [None, *differentiate(past, grads[: len(tensors)])[: len(tensors)]]

        return tuple(made), gradient

    order = _variable(graph := tf.compat.v1.get_default_graph())
    # tf.function would see to this order itself, but not in gradients of loops.
    with tf.control_dependencies([op for op in [getattr(graph, _LAST, None)] if op is not None]):
        token = tf.raw_ops.ReadVariableOp(resource=order, dtype=tf.int32)
    made = tf.custom_gradient(call)(token, *past.inputs)
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
    """What is compiled together, or called from one function: calls in it have an order."""

    @functools.cached_property
    def order(self) -> tf.Tensor:
        """The handle of the variable that the order goes through."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                refuse("operation", "it is in a graph of TensorFlow 1")
            # Not a tf.Variable, which a tf.function wants to have for itself.
            handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=_ANONYMOUS)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
        return handle

    def RequiresUniqueFunctionRetracing(self) -> bool:
        """For TensorFlow: see :func:`_trace_again`."""
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
    for graph in graphs:  # each may be in use for longer than the others
        setattr(graph, _PROGRAM, program)
    return program


def _variable(graph: Any) -> tf.Tensor:
    """The program's variable in a graph of it."""
    program = _program()
    if program is None:
        refuse("operation", "it is in a graph of TensorFlow 1")
    order = program.order
    if type(graph) is not _FunctionGraph:
        # A loop or a branch. In the gradient of a loop TensorFlow knows only what it finds around it.
        with graph.outer_graph.as_default():
            order = _variable(graph.outer_graph)
    captured: tf.Tensor = graph.capture(order)
    return captured


def _trace_again() -> None:
    """Have TensorFlow trace a ``tf.function`` once more for each program that XLA compiles.

    It would use what it has traced outside, which XLA cannot compile, or the other way round; and the order of another
    program's calls."""
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


_trace_again()
