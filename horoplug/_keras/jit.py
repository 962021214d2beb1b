"""Disables Keras' ``jit_compile`` where gradients cannot be reduced in compiled functions."""

import warnings
from collections.abc import Callable
from typing import Any

_PATCHED = "_horoplug_patched"  # attribute of the patched property
_WARNED = "_horoplug_warned"  # attribute of a model whose user has been warned


def compile_where_possible(
    kind: Any, can_compile: Callable[[], bool], is_distributed: Callable[[Any], bool]
) -> None:
    """Patch a model class (``keras.Model``) so that its models run without ``jit_compile`` if their optimizer is
    distributed and ``can_compile()`` is false. Warns once for each model.

    Keras' default ``"auto"`` compiles wherever there is a GPU. The setting of the model itself does not change."""
    original = kind.jit_compile
    if hasattr(original.fget, _PATCHED):
        return

    def jit_compile(model: Any) -> Any:
        chosen = original.fget(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # a LossScaleOptimizer has one
        if not chosen or not (is_distributed(optimizer) or is_distributed(inner)) or can_compile():
            return chosen
        if not getattr(model, _WARNED, False):
            setattr(model, _WARNED, True)
            warnings.warn(
                "horoplug can reduce gradients in functions that XLA compiles for the CPU only; this model is trained "
                "with jit_compile=False.",
                stacklevel=2,
            )
        return False

    setattr(jit_compile, _PATCHED, True)
    kind.jit_compile = property(jit_compile, original.fset)
