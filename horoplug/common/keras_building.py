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
    config, is_built = broadcast_object((config, getattr(optimizer, "built", False)))
    if config and not model.built:
        model.build_from_config(config)
        model.built = True  # Keras does not set it for a model that builds itself by a call
    if is_built and model.built and not getattr(optimizer, "built", True):
        optimizer.build(model.trainable_variables)
