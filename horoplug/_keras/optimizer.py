"""``DistributedOptimizer`` for optimizers of Keras 2 and Keras 3."""

import importlib
from dataclasses import replace
from typing import Any, TypeVar

from horoplug._keras import keras3
from horoplug._keras.distribution import is_distributed
from horoplug.base.errors import not_an_optimizer
from horoplug.common.reduction_options import ReductionOptions, weights_of

Optimizer = TypeVar("Optimizer")


def make(optimizer: Optimizer, options: ReductionOptions, local_layers: Any = None) -> Optimizer:
    """Make an optimizer a distributed one and return it.

    This is ``DistributedOptimizer`` and ``PartialDistributedOptimizer`` of :mod:`horoplug.keras` and
    :mod:`horoplug.tensorflow.keras`, which describe it."""
    if is_distributed(optimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, type) or not hasattr(optimizer, "apply_gradients"):
        raise ValueError(not_an_optimizer("a Keras optimizer", optimizer))
    if not options.name:
        options = replace(options, name=f"Distributed{type(optimizer).__name__}")
    distributed: Any
    if hasattr(optimizer, "stateless_apply"):
        distributed = keras3.distribute(optimizer, options)
    else:
        # Imported here because it imports TensorFlow, which other backends do not need.
        keras2 = importlib.import_module("horoplug._keras.keras2")
        distributed = keras2.distribute(optimizer, options)
    for variable in weights_of(local_layers):
        distributed.register_local_var(variable)
    made: Optimizer = distributed
    return made
