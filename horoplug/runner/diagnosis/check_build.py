"""The table of ``horovodrun --check-build``, without importing any framework."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

from . import gpu

# Name, module to look for, distributions that may carry its version.
_FRAMEWORKS = (
    ("NumPy", "numpy", ("numpy",)),
    ("PyTorch", "torch", ("torch",)),
    ("TensorFlow", "tensorflow", ("tensorflow", "tensorflow-cpu", "tf-nightly")),
    ("Keras", "keras", ("keras",)),
    ("JAX", "jax", ("jax",)),
    ("MXNet", "mxnet", ("mxnet",)),
)


def version() -> str:
    """The version of this package; for a checkout that is not installed, the version of the core."""
    try:
        return importlib.metadata.version("horoplug")
    except importlib.metadata.PackageNotFoundError:
        native = _native()
        return native.version() if isinstance(native, ModuleType) else "unknown (not installed)"


def table(gpus: bool = False) -> str:
    """The whole table. ``gpus``: with the parts of CUDA, which initialises CUDA in this process."""
    native = _native()
    lines = [f"Horoplug v{version()}:", "", "Available Frameworks:"]
    lines += [_framework(*framework) for framework in _FRAMEWORKS]
    works = isinstance(native, ModuleType)
    lines += ["", "Available Controllers:", _entry(works, "Gloo-compatible TCP and shared memory")]
    with_mpi = importlib.util.find_spec("mpi4py") is not None
    lines += [_entry(with_mpi, "MPI, through mpi4py"), "", "Available Tensor Operations:"]
    if isinstance(native, ModuleType):
        found = [text.strip() for text in native.algorithms().splitlines() if text.strip()]
        lines += [_entry(True, text) for text in found]
        lines += ["", f"CPU kernels: {native.cpu_kernels()}"]
        lines += ["", "GPUs:", *gpu.lines()] if gpus else []
    else:
        lines += [_entry(False, "none"), "", f"The core cannot be loaded: {native}"]
    return "\n".join(lines)


def _native() -> ModuleType | str:
    """The core's module, or one line that tells why it cannot be loaded."""
    try:
        return importlib.import_module("horoplug._native")
    except Exception as error:  # the rest of the table is useful in any case
        return " ".join(f"{type(error).__name__}: {error}".split())


def _framework(name: str, module: str, distributions: tuple[str, ...]) -> str:
    if importlib.util.find_spec(module) is None:
        return _entry(False, name)
    for distribution in distributions:
        try:
            return _entry(True, f"{name} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return _entry(True, name)


def _entry(available: bool, text: str) -> str:
    return f"    [{'X' if available else ' '}] {text}"
