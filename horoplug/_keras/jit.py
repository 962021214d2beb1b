"""Keras' ``jit_compile`` where gradients cannot be reduced in a compiled function."""

import warnings
from collections.abc import Callable
from typing import Any

_SAID = "_horoplug_said"  # of a model: the user knows


def compile_where_possible(
    kind: Any, can_compile: Callable[[], bool], is_distributed: Callable[[Any], bool]
) -> None:
    """Have models of a class (``keras.Model``) run without ``jit_compile`` if their optimizer is distributed and
    ``can_compile()`` is false, and say so once.

    Keras' ``"auto"`` compiles wherever there is a GPU. What a model was told stays as it is."""
    told = kind.jit_compile
    if hasattr(told.fget, _SAID):
        return

    def jit_compile(model: Any) -> Any:
        chosen = told.fget(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        if not chosen or not (is_distributed(optimizer) or is_distributed(inner)) or can_compile():
            return chosen
        if not getattr(model, _SAID, False):
            setattr(model, _SAID, True)
            warnings.warn(
                "horoplug reduces gradients in functions that XLA compiles for the CPU only, so that this model is "
                "trained with jit_compile=False.",
                stacklevel=2,
            )
        return False

    setattr(jit_compile, _SAID, True)
    kind.jit_compile = property(jit_compile, told.fset)
