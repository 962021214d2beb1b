"""Loads the library of TensorFlow operations (``csrc/bindings/tensorflow``) and passes it the current engine."""

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from horoplug._native import Engine
from horoplug.common.context import context

Function = TypeVar("Function", bound=Callable[..., Any])

_PATH = Path(__file__).resolve().parent.parent / "libhoroplug_tensorflow.so"

# Operations that always run in the order of the program.
_ORDERED = ("HorovodJoin", "HorovodBarrier")
# TensorFlow's tables of operations that tf.function runs in any order, and even if their results are unused.
_TABLES = ("ASYNC_STATEFUL_OPS", "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS")


def _load() -> tuple[Any, bool]:
    """The module with a function for each operation, and whether this version has asynchronous kernels.

    Raises ImportError if the operations cannot be registered with this version of TensorFlow."""
    if not _PATH.exists():
        raise ImportError(f"{_PATH} is missing: build or install horoplug again")
    module = tf.load_op_library(str(_PATH))
    library = ctypes.CDLL(str(_PATH))
    library.horoplug_tensorflow_problem.restype = ctypes.c_char_p
    problem = library.horoplug_tensorflow_problem().decode()
    if problem:
        raise ImportError(
            f"horoplug cannot be used with TensorFlow {tf.__version__}, whose C API it needs: {problem}"
        )
    library.horoplug_tensorflow_asynchronous.restype = ctypes.c_bool
    library.horoplug_tensorflow_use.restype = None
    library.horoplug_tensorflow_use.argtypes = [ctypes.c_void_p] + [ctypes.c_int32] * 3

    def use(engine: Engine | None) -> None:
        if engine is None:
            library.horoplug_tensorflow_use(None, 0, 0, 0)
        else:
            connections = context.connections()
            library.horoplug_tensorflow_use(
                engine.address, connections.rank, connections.local_rank, connections.local_size
            )

    context.follow(use)
    return module, library.horoplug_tensorflow_asynchronous()


def _names(module: Any) -> list[str]:
    """The registered names of the operations, such as HorovodAllreduce for the function horovod_allreduce."""
    functions = [name for name in vars(module) if re.fullmatch(r"horovod(_[a-z]+)+", name)]
    kept = [name for name in functions if not name.endswith("_eager_fallback")]
    return ["".join(part.capitalize() for part in name.split("_")) for name in kept]


def _unordered_tables() -> dict[str, frozenset[str]] | None:
    """TensorFlow's tables of unordered operations, or None if this version has none."""
    try:
        from tensorflow.python.framework import auto_control_deps as rules
    except ImportError:
        return None
    tables = {name: getattr(rules, name, None) for name in _TABLES}
    if not all(isinstance(table, (frozenset, set)) for table in tables.values()):
        return None
    return {name: frozenset(table) for name, table in tables.items() if table is not None}


def _set_tables(tables: dict[str, frozenset[str]]) -> None:
    from tensorflow.python.framework import auto_control_deps as rules

    for name, table in tables.items():
        setattr(rules, name, table)


OPS, _ASYNCHRONOUS = _load()
_ORIGINAL_TABLES = _unordered_tables()

# Let tf.function run every operation as soon as its inputs are ready, even if its results are unused. By default,
# tf.function runs operations with side effects one after the other, and ranks that differ in the order would wait for
# each other. It also drops operations whose results are unused, for which the other ranks would wait. In contrast,
# kernels that block need the order of the program, which is the same on all ranks: in any other order they could block
# all threads of TensorFlow.
if _ASYNCHRONOUS and _ORIGINAL_TABLES is not None:
    _unordered = frozenset(name for name in _names(OPS) if name not in _ORDERED)
    _set_tables({name: table | _unordered for name, table in _ORIGINAL_TABLES.items()})


@functools.cache
def _kernels_defer() -> bool:
    """Whether asynchronous kernels return before their operation is done. If they do not, this function restores
    TensorFlow's order of operations in ``tf.function``."""
    with tf.init_scope(), tf.device("CPU:0"):
        defers = bool(OPS.horovod_defers().numpy() == 1)
    if not defers:
        _set_tables(_ORIGINAL_TABLES or {})
    return defers


def runs_concurrently() -> bool:
    """Whether a graph runs its operations concurrently and in any order, instead of one after the other.

    Must be called before a graph with operations is complete, because the first call may change how graphs order
    operations."""
    if not _ASYNCHRONOUS or _ORIGINAL_TABLES is None:
        return False
    with tf.init_scope():
        can_test = tf.executing_eagerly()
    return _kernels_defer() if can_test else True


def do_not_convert(function: Function) -> Function:
    """Exclude a function, and the functions that it calls, from AutoGraph's conversion."""
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept


def register_xla() -> str:
    """Register horoplug's custom call with XLA. Returns what TensorFlow lacks for that, or an empty string."""
    register = ctypes.CDLL(str(_PATH)).horoplug_tensorflow_xla
    register.restype = ctypes.c_char_p
    missing: str = register().decode()
    return missing
