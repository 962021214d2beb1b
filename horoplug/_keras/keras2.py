"""Optimizers of Keras 2 (``tf_keras``, and ``tf.keras`` before TensorFlow 2.16), which run on TensorFlow only."""

from collections.abc import Iterable
from typing import Any

from horoplug._keras.optimizer import Distribution, take_class
from horoplug._keras.options import Options


class _Distributed:
    """What is put before the class of the user's optimizer."""

    _horoplug: Distribution
    _aggregation: Any  # a LocalGradientAggregationHelper

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank alone."""
        self._horoplug.register_local(var)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """As the optimizer's own, on the gradients of all ranks."""
        apply = super().apply_gradients  # type: ignore[misc]
        gradients, variables = zip(*grads_and_vars, strict=True)
        reduced = self._aggregation.compute_gradients(gradients, variables)
        pairs = list(zip(reduced, variables, strict=True))
        return self._aggregation.apply_gradients(lambda: apply(pairs, *args, **kwargs), self, pairs)


def distribute(optimizer: Any, options: Options, passes: int, average_aggregated: bool) -> Any:
    """Make an optimizer of Keras 2 a distributed one; see :func:`horoplug._keras.optimizer.distribute`."""
    from horoplug._keras.backends import tensorflow
    from horoplug.tensorflow.gradient_aggregation import LocalGradientAggregationHelper as Helper

    distribution = Distribution(tensorflow, options, passes, 1)
    made = take_class(optimizer, _Distributed, distribution)
    type(made)._aggregation = Helper(
        passes,
        distribution.reduce,
        options.sparse_as_dense,
        average_aggregated,
        optimizer_type=Helper._OPTIMIZER_TYPE_KERAS,
        process_set=options.process_set,
        scale_local_gradients=options.scale_local_gradients,
    )
    return made
