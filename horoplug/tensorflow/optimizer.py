"""``DistributedOptimizer`` for optimizers of TensorFlow 1. Keras optimizers are passed on to
:mod:`horoplug.tensorflow.keras`."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from horoplug.base.errors import not_an_optimizer
from horoplug.common.compression import AnyCompressor
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Adasum, Average, check_ranks
from horoplug.common.reduction_options import ReductionOptions
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper,
    cond_list,
    private_variable,
)
from horoplug.tensorflow.library import do_not_convert
from horoplug.tensorflow.reduction import Reduction

_LegacyOptimizer = tf.compat.v1.train.Optimizer
Pairs = Sequence[tuple[Any, Any]]


class _Wrapper(_LegacyOptimizer):  # type: ignore[misc,valid-type]
    """An optimizer of TensorFlow 1 that delegates to the user's optimizer."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """The method of the wrapped optimizer, like the following ones."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """Reduces gradients in ``compute_gradients``."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reduction: Reduction
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reduction, options = reduction, reduction.options
        self._agg_helper = LocalGradientAggregationHelper(
            options.backward_passes_per_step,
            reduction.reduce,
            options.sparse_as_dense,
            options.average_aggregated_gradients,
            process_set=options.process_set,
            name=f"{self.get_name()}_",
        )

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction."""
        self._reduction.register_local(var)

    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's pairs of gradient and variable, reduced over the ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        reduced = self._agg_helper.compute_gradients([grad for grad, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    @do_not_convert
    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients that ``compute_gradients`` has returned. If ``compute_gradients`` has only accumulated them,
        only ``global_step`` changes."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        return self._agg_helper.apply_gradients(
            apply, self._optimizer, pairs, global_step=global_step
        )


class _DistributedAdasumOptimizer(_Wrapper):
    """An optimizer in which every rank applies its own gradients, and Adasum combines the changes of the variables
    (Maleki et al., Scaling Distributed Training with Adaptive Summation, 2020). It corresponds to
    :mod:`horoplug.torch.adasum_optimizer`."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reduction: Reduction
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reduction = reduction
        self._steps = reduction.options.backward_passes_per_step
        self._counter: Any = None  # steps since the last combination
        self._starts: list[Any] = []  # the values of the variables at the last combination

    @do_not_convert
    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients on this rank. After every ``backward_passes_per_step`` steps, set the variables to their
        values at the last combination plus the Adasum of the changes on all ranks."""
        pairs = list(grads_and_vars)
        # Including variables without a gradient, which may have one on other ranks.
        variables = [variable for _, variable in pairs if variable.dtype.is_floating]
        with tf.control_dependencies([grad for grad, _ in pairs if grad is not None]):
            starts, is_last = self._begin(variables)
        with tf.control_dependencies([*starts, is_last]):
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies([] if applied is None else [applied]):

            def combine() -> tf.Tensor:
                deltas = [v.read_value() - s for v, s in zip(variables, starts, strict=True)]
                reduced = self._reduction.reduce(deltas, variables)
                assigned = [
                    tf.convert_to_tensor(v.assign(s + d))
                    for v, s, d in zip(variables, starts, reduced, strict=True)
                ]
                with tf.control_dependencies(assigned):
                    return tf.constant(True)

            combined = (
                combine()
                if self._steps == 1
                else tf.cond(is_last, combine, lambda: tf.constant(False))
            )
        return None if tf.executing_eagerly() else tf.group(combined)

    def _begin(self, variables: Sequence[Any]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The values of the variables at the last combination, and whether the steps are combined after this one."""
        values = [tf.identity(variable.read_value()) for variable in variables]
        if self._steps == 1:
            return values, tf.constant(True)
        if self._counter is None:
            self._counter = private_variable([], tf.int32, f"{self.get_name()}_counter")
        for i in range(len(self._starts), len(variables)):
            like = variables[i]
            name = f"{self.get_name()}_start_{i}"
            self._starts.append(private_variable(like.shape, like.dtype.base_dtype, name))
        step = tf.convert_to_tensor(self._counter.assign((self._counter + 1) % self._steps))
        starts = cond_list(
            tf.equal(step, 1),
            lambda: [
                tf.convert_to_tensor(start.assign(value))
                for start, value in zip(self._starts, values, strict=True)
            ],
            lambda: [tf.identity(start.read_value()) for start in self._starts],
        )
        return starts, tf.equal(step, 0)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that replaces `optimizer` and reduces gradients over the ranks.

    For optimizers of ``tf.compat.v1.train``, in graphs and in eager mode. Other optimizers are passed on to
    ``horoplug.tensorflow.keras.DistributedOptimizer``, with all arguments except ``use_locking``.

    ``name``: of the optimizer, and prefix of its operations' names.
    ``use_locking``: as for the optimizers of TensorFlow 1.
    ``backward_passes_per_step``: the number of batches whose gradients are added before they are reduced. The variables
        change only after the last of these batches.
    ``average_aggregated_gradients``: divide the sums by the number of batches.
    ``op``: the reduction. Adasum combines the changes that each rank's own steps have made to the variables.

    The other arguments are those of :func:`horoplug.tensorflow.DistributedGradientTape`. The method
    ``register_local_var(variable)`` excludes the gradient of a variable from the reduction.

    Raises ValueError for an object that is not an optimizer, and for options that cannot be combined.

    Example, on two ranks:

        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.25 * hvd.size()))
        w = tf.Variable([1.0, 1.0])
        gradient = tf.constant([3.0, 3.0]) * hvd.rank()  # 0 and 3
        optimizer.apply_gradients([(gradient, w)])
        w  # -> [0.25, 0.25]
    """
    options = ReductionOptions(
        name=name or "",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if not isinstance(optimizer, _LegacyOptimizer):
        if isinstance(optimizer, type) or not hasattr(optimizer, "apply_gradients"):
            expected = "an optimizer of Keras or of tf.compat.v1.train"
            raise ValueError(not_an_optimizer(expected, optimizer))
        # Imported here because Keras is an optional dependency.
        keras = importlib.import_module("horoplug.tensorflow.keras.optimizer")
        return keras.make(optimizer, options)
    reduction = Reduction(replace(options, name=name or "DistributedOptimizer"))
    if options.op != Adasum:
        return _DistributedOptimizer(optimizer, name, use_locking, reduction)
    check_ranks(Adasum, process_set.size())
    if average_aggregated_gradients:
        raise ValueError(
            "average_aggregated_gradients cannot be used with op=Adasum, which does not add gradients"
        )
    return _DistributedAdasumOptimizer(optimizer, name, use_locking, reduction)
