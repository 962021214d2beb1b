"""Loads the library that XLA calls (``csrc/bindings/jax``) and passes it the current engine."""

import ctypes
from pathlib import Path
from typing import Any, Final

import jax
from jax import ffi

from horoplug._native import Engine
from horoplug.common.context import context
from horoplug.jax.order import wait_for_programs

_PATH = Path(__file__).resolve().parent.parent / "libhoroplug_jax.so"

TARGET: Final = "horoplug_run"
COPY_RESULTS_TARGET: Final = "horoplug_copy_results"
# JAX's platforms, and XLA's names for them. The handlers are the same on all platforms.
PLATFORMS: Final = {"cpu": "cpu", "cuda": "CUDA"}
_INT32: Final = ctypes.c_int32


class _TracedState:
    """Values of the job, such as rank and size, that Python code may have read while it was traced. Compiled programs
    may contain them as constants."""

    def __init__(self) -> None:
        self.position: tuple[int, int] | None = None  # rank and size
        self.has_sets = False  # process sets besides the global one

    def begin_job(self) -> None:
        """Clear JAX's compilation caches if programs of the previous job may be wrong in this one."""
        connections = context.connections()
        position = (connections.rank, connections.size)
        if self.has_sets or self.position not in (None, position):
            jax.clear_caches()
        self.position, self.has_sets = position, False


TRACED = _TracedState()


def _register(target: str, handler: Any, platform: str) -> None:
    """Register a handler with XLA. Raises ImportError if XLA refuses it, for example because XLA has another version of
    its foreign function interface."""
    try:
        ffi.register_ffi_target(target, ffi.pycapsule(handler), platform=platform)
    except Exception as error:
        raise ImportError(
            f"the XLA of JAX {jax.__version__} refuses horoplug's operations; install a newer horoplug or an older "
            f"JAX: {' '.join(str(error).split())}"
        ) from error


def _load() -> Any:
    if not _PATH.exists():
        raise ImportError(f"{_PATH} is missing: build or install horoplug again")
    library = ctypes.CDLL(str(_PATH))
    int64s = ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("use", None, (ctypes.c_void_p,)),
        ("open", None, (_INT32, ctypes.c_char_p, int64s, _INT32)),
        ("await", _INT32, (_INT32, _INT32, ctypes.c_double)),
        ("failure", _INT32, (_INT32, ctypes.POINTER(ctypes.c_char_p))),
        ("row_counts", None, (_INT32, _INT32, int64s, _INT32)),
        ("close", _INT32, (_INT32, _INT32)),
    ):
        function = getattr(library, f"horoplug_jax_{name}")
        function.restype, function.argtypes = result, arguments

    def use(engine: Engine | None) -> None:
        if engine is not None:
            # An operation of the last job that has not begun by now fails. It must not join this job.
            wait_for_programs()
            TRACED.begin_job()
        library.horoplug_jax_use(None if engine is None else engine.address)

    for platform in PLATFORMS.values():
        for target, handler in (
            (TARGET, library.horoplug_jax_run),
            (COPY_RESULTS_TARGET, library.horoplug_jax_copy_results),
        ):
            _register(target, handler, platform)
    context.follow(use)
    return library


LIBRARY = _load()
ffi_lowering = ffi.ffi_lowering
