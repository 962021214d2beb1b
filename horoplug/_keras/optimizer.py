"""``DistributedOptimizer`` for optimizers of Keras 2 and Keras 3."""

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from horoplug._keras import keras3
from horoplug._keras.distribution import is_distributed
from horoplug._keras.options import ReductionOptions
from horoplug.base.errors import not_an_optimizer

Optimizer = TypeVar("Optimizer")


def make(optimizer: Optimizer, arguments: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer a distributed one and return it.

    This is ``DistributedOptimizer`` and ``PartialDistributedOptimizer`` of :mod:`horoplug.keras` and
    :mod:`horoplug.tensorflow.keras`, which describe it. ``arguments``: those of the user's call, by name."""
    if is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already.")
    if isinstance(optimizer, type) or not hasattr(optimizer, "apply_gradients"):
        raise ValueError(not_an_optimizer("a Keras optimizer", optimizer))
    passes = arguments["backward_passes_per_step"], arguments["average_aggregated_gradients"]
    if passes[0] < 1:
        raise ValueError(f"backward_passes_per_step={passes[0]}: it must be positive.")
    name = arguments["name"] or f"Distributed{type(optimizer).__name__}"
    options = ReductionOptions.of(name, arguments)
    distributed: Any
    if hasattr(optimizer, "stateless_apply"):
        distributed = keras3.distribute(optimizer, options, *passes)
    else:
        # Imported here because it imports TensorFlow, which other backends do not need.
        keras2 = importlib.import_module("horoplug._keras.keras2")
        distributed = keras2.distribute(optimizer, options, *passes)
    local_layers = arguments.get("local_layers")
    layers = local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights if layer is not None else ():
            distributed.register_local_var(variable)
    made: Optimizer = distributed
    return made
