"""Building of Keras models, of any version of Keras, in processes that join an elastic job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def build_as_on_root(model: Any, optimizer: Any, broadcast_object: Callable[[Any], Any]) -> None:
    """Create the variables of a model that has none yet, and those of its optimizer, if they exist on rank 0. In a
    process that has just joined the job, the model has not been called yet. Collective.

    ``broadcast_object``: broadcasts an object of rank 0."""
    describe = getattr(model, "get_build_config", None)  # missing in old versions
    config = describe() if describe is not None and model.built else None
    config, is_built = broadcast_object((config, _is_built(optimizer)))
    if config and not model.built:
        model.build_from_config(config)
        model.built = True  # Keras does not set it for a model that builds itself by a call
    if is_built:
        build_optimizer(model, optimizer)


def build_optimizer(model: Any, optimizer: Any) -> None:
    """Create the variables of an optimizer that has none, if those of its model exist."""
    if model.built and hasattr(optimizer, "build") and not _is_built(optimizer):
        optimizer.build(model.trainable_variables)


def _is_built(optimizer: Any) -> bool:
    # The attribute of Keras 2 begins with an underscore, and is missing before.
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))
