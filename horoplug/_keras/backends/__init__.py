"""One module for each of Keras' backends, with the same names: ``Compression``; ``native`` (what a variable is to the
framework); ``BackendReduction`` (a :class:`horoplug._keras.options.Reduction`); ``allreduce``, ``allgather``,
``broadcast`` and ``reducescatter`` on the framework's tensors; ``failure``."""

import importlib
import sys
from typing import Any, Final

_TENSORS: Final = {"tensorflow": ("Tensor", "Variable"), "torch": ("Tensor",), "jax": ("Array",)}


def load(name: str) -> Any:
    """The module of a backend, by Keras' name for it.

    Raises ImportError for one that cannot train."""
    if name not in _TENSORS:
        raise ImportError(
            f"horoplug.keras works with Keras' backends {', '.join(_TENSORS)}, not with {name!r}; set KERAS_BACKEND."
        )
    return importlib.import_module(f"{__name__}.{name}")


def of(value: Any) -> Any:
    """The module of the backend whose tensor a value is; None if it is no tensor."""
    for name, kinds in _TENSORS.items():
        framework = sys.modules.get(name)
        if framework and isinstance(value, tuple(getattr(framework, kind) for kind in kinds)):
            return load(name)
    return None
