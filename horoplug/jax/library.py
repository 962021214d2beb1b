"""Opens the library that XLA calls (``csrc/bindings/jax``) and tells it of the engine."""

import ctypes
from pathlib import Path
from typing import Any, Final

import jax
from jax import ffi

from horoplug._native import Engine
from horoplug.common.context import context

_PATH = Path(__file__).resolve().parent.parent / "libhoroplug_jax.so"

TARGET: Final = "horoplug_run"
TAKE_TARGET: Final = "horoplug_take"
# JAX's platforms, with XLA's names for them. The handlers are the same.
PLATFORMS: Final = {"cpu": "cpu", "cuda": "CUDA"}
_INT32: Final = ctypes.c_int32


class _Traced:
    """What compiled programs may depend on: rank and size, as their Python code has asked for them."""

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        self.has_sets = False

    def begin(self) -> None:
        """A job has begun. Programs of another one are compiled anew if they may be wrong in it."""
        mesh = context.mesh()
        place = (mesh.rank, mesh.size)
        if self.has_sets or self.place not in (None, place):
            jax.clear_caches()
        self.place, self.has_sets = place, False


TRACED = _Traced()


def _load() -> Any:
    if not _PATH.exists():
        raise ImportError(f"{_PATH} is missing: build or install horoplug again.")
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
        library.horoplug_jax_use(None if engine is None else engine.address)
        if engine is not None:
            TRACED.begin()

    for platform in PLATFORMS.values():
        for target, handler in (
            (TARGET, library.horoplug_jax_run),
            (TAKE_TARGET, library.horoplug_jax_take),
        ):
            ffi.register_ffi_target(target, ffi.pycapsule(handler), platform=platform)
    context.follow(use)
    return library


LIBRARY = _load()
ffi_lowering = ffi.ffi_lowering
