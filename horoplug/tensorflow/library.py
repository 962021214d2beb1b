"""Opens the library that has TensorFlow's operations (``csrc/bindings/tensorflow``) and tells it of the engine."""

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

# These want to run where the program has them.
_ORDERED = ("HorovodJoin", "HorovodBarrier")
# Where TensorFlow has the operations that tf.function runs in any order, and in any case.
_TABLES = ("ASYNC_STATEFUL_OPS", "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS")


def _load() -> tuple[Any, bool]:
    """The module with a function for each operation, and whether it has asynchronous kernels.

    Raises ImportError if TensorFlow cannot have the operations."""
    if not _PATH.exists():
        raise ImportError(f"{_PATH} is missing: build or install horoplug again.")
    module = tf.load_op_library(str(_PATH))
    library = ctypes.CDLL(str(_PATH))
    library.horoplug_tensorflow_problem.restype = ctypes.c_char_p
    problem = library.horoplug_tensorflow_problem().decode()
    if problem:
        raise ImportError(
            f"horoplug cannot be used with TensorFlow {tf.__version__}, whose C interface it needs: {problem}."
        )
    library.horoplug_tensorflow_asynchronous.restype = ctypes.c_bool
    library.horoplug_tensorflow_use.restype = None
    library.horoplug_tensorflow_use.argtypes = [ctypes.c_void_p] + [ctypes.c_int32] * 3

    def use(engine: Engine | None) -> None:
        if engine is None:
            library.horoplug_tensorflow_use(None, 0, 0, 0)
        else:
            mesh = context.mesh()
            library.horoplug_tensorflow_use(
                engine.address, mesh.rank, mesh.local_rank, mesh.local_size
            )

    context.follow(use)
    return module, library.horoplug_tensorflow_asynchronous()


def _names(module: Any) -> list[str]:
    """The registered names of the operations: HorovodAllreduce of horovod_allreduce."""
    functions = [name for name in vars(module) if re.fullmatch(r"horovod(_[a-z]+)+", name)]
    kept = [name for name in functions if not name.endswith("_eager_fallback")]
    return ["".join(part.capitalize() for part in name.split("_")) for name in kept]


def _order_tables() -> dict[str, frozenset[str]] | None:
    """TensorFlow's tables of operations without an order, or None if this version has none."""
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
_BEFORE = _order_tables()

# Have tf.function run operations as soon as their inputs are there, and in any case. It would run them one after the
# other, as everything with side effects; but ranks that differ in the order would wait for each other then. And one
# that drops an operation because nobody uses the result would keep the others waiting. Kernels that wait, however, want
# the program's order, which is the same on all ranks: else they could take all of TensorFlow's threads.
if _ASYNCHRONOUS and _BEFORE is not None:
    _ours = frozenset(name for name in _names(OPS) if name not in _ORDERED)
    _set_tables({name: table | _ours for name, table in _BEFORE.items()})


@functools.cache
def _defers() -> bool:
    """Whether asynchronous kernels do what they are for. If not, ``tf.function`` keeps operations in order."""
    with tf.init_scope(), tf.device("CPU:0"):
        defers = bool(OPS.horovod_defers().numpy() == 1)
    if not defers:
        _set_tables(_BEFORE or {})
    return defers


def in_any_order() -> bool:
    """Whether a graph has operations under way in any order and side by side, and not one after the other.

    To be asked before a graph is complete that has operations in it."""
    if not _ASYNCHRONOUS or _BEFORE is None:
        return False
    with tf.init_scope():
        can_ask = tf.executing_eagerly()
    return _defers() if can_ask else True


def as_written(function: Function) -> Function:
    """Keep ``tf.function`` from rewriting a function, and what it calls, line by line, as it does with users' code."""
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept


def prepare_xla() -> str:
    """Make horoplug known to XLA. Returns what TensorFlow lacks for that, or an empty string."""
    register = ctypes.CDLL(str(_PATH)).horoplug_tensorflow_xla
    register.restype = ctypes.c_char_p
    missing: str = register().decode()
    return missing
