"""``DistributedOptimizer``: for the optimizers of TensorFlow 1 here, for those of Keras in
:mod:`horoplug.tensorflow.keras`."""

import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Adasum, Average, check_ranks
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper,
    one_of,
    private_variable,
)
from horoplug.tensorflow.library import as_written
from horoplug.tensorflow.reduction import Groups, Reduction

_LegacyOptimizer = tf.compat.v1.train.Optimizer
Pairs = Sequence[tuple[Any, Any]]


class _Wrapper(_LegacyOptimizer):  # type: ignore[misc,valid-type]
    """An optimizer of TensorFlow 1 around the user's, which computes and applies."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """See the wrapped optimizer; so for the following ones."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """Reduces gradients when they have been computed."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: Reduction,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._reduction = reduction
        self._agg_helper = LocalGradientAggregationHelper(
            backward_passes_per_step,
            reduction.reduce,
            reduction.sparse_as_dense,
            average_aggregated_gradients,
            process_set=reduction.process_set,
            name=f"{self.get_name()}_",
        )

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to this rank alone."""
        self._reduction.leave_local(var)

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's pairs of gradient and variable, reduced over the ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        reduced = self._agg_helper.compute_gradients([grad for grad, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    @as_written
    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As the wrapped optimizer, for gradients that ``compute_gradients`` has returned. If it has only added them
        up, ``global_step`` is all that changes."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        return self._agg_helper.apply_gradients(
            apply, self._optimizer, pairs, global_step=global_step
        )


class _DistributedAdasumOptimizer(_Wrapper):
    """Every rank steps by itself, and Adasum combines the steps, for which it is made (see
    :mod:`horoplug.torch.adasum_optimizer`)."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: Reduction,
        backward_passes_per_step: int,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        if backward_passes_per_step < 1:
            raise ValueError("backward_passes_per_step takes a positive number.")
        self._reduction = reduction
        self._steps = backward_passes_per_step
        self._counter: Any = None  # own steps since the last ones were combined
        self._starts: list[Any] = []  # the variables as they were then

    @as_written
    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients on this rank; after every ``backward_passes_per_step`` of these steps the variables become
        what they were before plus Adasum of what all ranks have added to them."""
        pairs = list(grads_and_vars)
        # Those without a gradient, too: other ranks may have one.
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
        """The variables' values when steps were combined last, and whether they are to be after this one."""
        values = [tf.identity(variable.read_value()) for variable in variables]
        if self._steps == 1:
            return values, tf.constant(True)
        if self._counter is None:
            self._counter = private_variable([], tf.int32, f"{self.get_name()}_counter")
        for place in range(len(self._starts), len(variables)):
            like = variables[place]
            name = f"{self.get_name()}_start_{place}"
            self._starts.append(private_variable(like.shape, like.dtype.base_dtype, name))
        turn = tf.convert_to_tensor(self._counter.assign((self._counter + 1) % self._steps))
        starts = one_of(
            tf.equal(turn, 1),
            lambda: [
                tf.convert_to_tensor(start.assign(value))
                for start, value in zip(self._starts, values, strict=True)
            ],
            lambda: [tf.identity(start.read_value()) for start in self._starts],
        )
        return starts, tf.equal(turn, 0)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
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
    """An optimizer that takes the place of `optimizer` and reduces gradients over the ranks.

    For an optimizer of ``tf.compat.v1.train``, in graphs and eagerly. Any other is one of Keras: see
    ``horoplug.tensorflow.keras.DistributedOptimizer``, which gets all arguments but ``use_locking``.

    ``backward_passes_per_step``: add up the gradients of so many batches and reduce them once; the variables change
    then only. ``average_aggregated_gradients``: divide the sums by the number of batches. ``op=Adasum`` combines what
    the ranks' own steps have added to the variables. ``register_local_var(variable)`` leaves a gradient to each rank
    alone. ``name``: the optimizer's, and that of its operations. For the other arguments see
    :func:`horoplug.tensorflow.DistributedGradientTape`.

    Raises ValueError for something that is no optimizer, and for options that do not go together."""
    arguments = dict(locals())
    if not isinstance(optimizer, _LegacyOptimizer):
        if not hasattr(optimizer, "apply_gradients"):
            raise ValueError(
                "DistributedOptimizer takes an optimizer of Keras or of tf.compat.v1.train, got "
                f"{type(optimizer).__name__}."
            )
        del arguments["use_locking"]
        keras = importlib.import_module("horoplug.tensorflow.keras")
        return keras.DistributedOptimizer(**arguments)
    reduction = Reduction.of(name or "DistributedOptimizer", arguments)
    if op != Adasum:
        return _DistributedOptimizer(
            optimizer,
            name,
            use_locking,
            reduction,
            backward_passes_per_step,
            average_aggregated_gradients,
        )
    check_ranks(op, process_set.size())
    if average_aggregated_gradients:
        raise ValueError(
            "average_aggregated_gradients is not for op=Adasum, which adds no gradients up."
        )
    return _DistributedAdasumOptimizer(
        optimizer, name, use_locking, reduction, backward_passes_per_step
    )
