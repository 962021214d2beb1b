"""Distributed optimizers of Keras 2 (``tf_keras``, and ``tf.keras`` before TensorFlow 2.16), which needs TensorFlow."""

from collections.abc import Iterable
from typing import Any

from horoplug._keras.backends import tensorflow as backend
from horoplug._keras.distribution import Distribution, make_distributed
from horoplug.common.keras_updates import updating
from horoplug.common.reduction_options import ReductionOptions
from horoplug.tensorflow.gradient_aggregation import LocalGradientAggregationHelper as Helper


class _DistributedMixin:
    """The base class that is added to the class of the user's optimizer."""

    _horoplug: Distribution
    _aggregation: Helper

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction."""
        self._horoplug.register_local(var)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """The optimizer's own method on the reduced gradients."""
        apply = super().apply_gradients  # type: ignore[misc]
        gradients, variables = zip(*grads_and_vars, strict=True)
        reduced = self._aggregation.compute_gradients(gradients, variables)
        pairs = list(zip(reduced, variables, strict=True))

        def update() -> Any:
            with updating(self, reduced, variables):
                return apply(pairs, *args, **kwargs)

        return self._aggregation.apply_gradients(update, self, pairs)


def distribute(optimizer: Any, options: ReductionOptions) -> Any:
    """Make an optimizer of Keras 2 a distributed one; see :func:`horoplug._keras.keras3.distribute`."""
    distribution = Distribution(backend, options, 1)
    made = make_distributed(optimizer, _DistributedMixin, distribution)
    type(made)._aggregation = Helper(
        options.backward_passes_per_step,
        distribution.reduce,
        options.sparse_as_dense,
        options.average_aggregated_gradients,
        optimizer_type=Helper._OPTIMIZER_TYPE_KERAS,
        process_set=options.process_set,
        scale_local_gradients=options.scale_local_gradients,
    )
    return made
