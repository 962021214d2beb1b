"""Opens the library that has TensorFlow's operations (``csrc/bindings/tensorflow``) and tells it of the engine."""

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from horoplug._native import Engine
from horoplug.common.context import context

_PATH = Path(__file__).resolve().parent.parent / "libhoroplug_tensorflow.so"

# These want to run where the program has them.
_ORDERED = ("HorovodJoin", "HorovodBarrier")


def _load() -> Any:
    """The module with a function for each operation. Raises ImportError if TensorFlow cannot have them."""
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
    return module


def _names(module: Any) -> list[str]:
    """The registered names of the operations: HorovodAllreduce of horovod_allreduce."""
    functions = [name for name in vars(module) if re.fullmatch(r"horovod(_[a-z]+)+", name)]
    kept = [name for name in functions if not name.endswith("_eager_fallback")]
    return ["".join(part.capitalize() for part in name.split("_")) for name in kept]


def _run_in_any_order(names: Sequence[str]) -> None:
    """Have ``tf.function`` run operations as soon as their inputs are there, and in any case.

    It would run them one after the other, as everything with side effects; but ranks that differ in the order would
    wait for each other then. And one that drops an operation because nobody uses the result would keep the others
    waiting."""
    try:
        from tensorflow.python.framework import auto_control_deps as rules
    except ImportError:
        return
    for table in ("ASYNC_STATEFUL_OPS", "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS"):
        known = getattr(rules, table, None)
        if isinstance(known, (frozenset, set)):
            setattr(rules, table, known.union(names))


OPS = _load()
_run_in_any_order([name for name in _names(OPS) if name not in _ORDERED])
