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
    library.horoplug_jax_use.restype = None
    library.horoplug_jax_use.argtypes = [ctypes.c_void_p]

    def use(engine: Engine | None) -> None:
        library.horoplug_jax_use(None if engine is None else engine.address)
        if engine is not None:
            TRACED.begin()

    ffi.register_ffi_target(TARGET, ffi.pycapsule(library.horoplug_jax_run), platform="cpu")
    context.follow(use)
    return library


LIBRARY = _load()
ffi_lowering = ffi.ffi_lowering
