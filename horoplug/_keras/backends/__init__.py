"""One module for each Keras backend. Each has ``Compression``; ``native`` (the framework's object for a variable);
``BackendReduction`` (a :class:`horoplug._keras.options.KerasReduction`); ``if_step``; ``all_true``; ``allreduce``,
``allgather``, ``broadcast`` and ``reducescatter`` on the framework's tensors; ``failure``; and ``Progress``. A module
may have ``can_compile``."""

import importlib
import sys
from typing import Any, Final

_TENSORS: Final = {"tensorflow": ("Tensor", "Variable"), "torch": ("Tensor",), "jax": ("Array",)}


def load(name: str) -> Any:
    """The module of a backend, by its name in Keras.

    Raises ImportError for a backend that is not supported."""
    if name not in _TENSORS:
        raise ImportError(
            f"horoplug.keras supports the Keras backends {', '.join(_TENSORS)}, not {name!r}; set KERAS_BACKEND"
        )
    return importlib.import_module(f"{__name__}.{name}")


def of(value: Any) -> Any:
    """The module of the backend to which a tensor belongs; None if the value is not a tensor."""
    for name, kinds in _TENSORS.items():
        framework = sys.modules.get(name)
        if framework and isinstance(value, tuple(getattr(framework, kind) for kind in kinds)):
            return load(name)
    return None
