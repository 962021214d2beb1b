"""Local gradient aggregation (``backward_passes_per_step``): the gradients of several batches are added on each rank
and reduced once."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.tensorflow.library import do_not_convert
from horoplug.tensorflow.reduction import scale_local


class LocalGradientAggregationHelper:
    """Adds gradients to variables, which it creates when it gets the first gradients. Works in eager mode,
    ``tf.function`` and graphs of TensorFlow 1.

    ``allreduce_func``: maps gradients and their variables to the reduced gradients. ``sparse_as_dense``: convert
    ``tf.IndexedSlices``, which cannot be added, to dense tensors. ``average_aggregated_gradients``: divide the sums by
    the number of batches. ``scale_local_gradients``: divide the gradients of local variables by the number of ranks.
    ``optimizer_type``: decides what counts the batches: ``iterations`` of a Keras optimizer, or the ``global_step`` of
    TensorFlow 1."""

    _OPTIMIZER_TYPE_KERAS: ClassVar = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY: ClassVar = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        if backward_passes_per_step < 1:
            raise ValueError("backward_passes_per_step takes a positive number")
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.optimizer_type = optimizer_type
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.name = name
        self.counter: Any = None  # batches since the last reduction
        self.locally_aggregated_grads: dict[int, Any] = {}  # the sums, by the index of the gradient
        self._local: dict[int, Any] = {}

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction."""
        self._local[id(var)] = var

    @do_not_convert
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add the gradients of a batch. Returns the reduced sums after every ``backward_passes_per_step`` batches, and
        the local sums after the other batches. Gradients that are None remain None.

        Raises ValueError for ``tf.IndexedSlices`` without ``sparse_as_dense``."""
        if self.backward_passes_per_step == 1:
            return self._reduced(list(grads), vars)
        dense = [self._dense(grad) for grad in grads]
        self._create(dense)
        indices = sorted(self.locally_aggregated_grads)
        variables = [self.locally_aggregated_grads[i] for i in indices]
        added = [
            tf.convert_to_tensor(variable.assign_add(dense[i]))
            for variable, i in zip(variables, indices, strict=True)
            if dense[i] is not None
        ]
        with tf.control_dependencies(added):
            sums = [variable.read_value() for variable in variables]
        with tf.control_dependencies(sums):
            count = tf.convert_to_tensor(self.counter.assign_add(1))

        def reduce() -> list[tf.Tensor]:
            given = [None] * len(dense)
            for i, value in zip(indices, sums, strict=True):
                given[i] = (
                    value / tf.cast(self.backward_passes_per_step, value.dtype)
                    if self.average_aggregated_gradients
                    else value
                )
            reduced = self._reduced(given, vars)
            results = [tf.convert_to_tensor(reduced[i]) for i in indices]
            with tf.control_dependencies(results):
                cleared = [variable.assign(tf.zeros_like(variable)) for variable in variables]
                cleared.append(self.counter.assign(0))
            with tf.control_dependencies([tf.convert_to_tensor(value) for value in cleared]):
                return [tf.identity(result) for result in results]

        is_last = tf.greater_equal(count, self.backward_passes_per_step)
        chosen = cond_list(is_last, reduce, lambda: [tf.identity(value) for value in sums])
        outputs: list[Any] = [None] * len(dense)
        for i, value in zip(indices, chosen, strict=True):
            outputs[i] = value
        return outputs

    @do_not_convert
    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the closure, which applies the gradients that :meth:`compute_gradients` has returned, if they were
        reduced. Otherwise only count the batch.

        ``args``: pairs of gradient and variable; ``global_step`` in ``kwargs``: a variable that counts batches.
        Returns the result of the closure; in graphs an operation."""
        if self.counter is None:
            return apply_grads_closure()
        pairs = args[0] if args else ()
        with tf.control_dependencies([grad for grad, _ in pairs if grad is not None]):
            is_reduced = tf.equal(self.counter.read_value(), 0)
        if tf.executing_eagerly():
            return apply_grads_closure() if is_reduced else self._count(optimizer, kwargs)

        def after(run: Callable[[], Any]) -> Callable[[], tf.Tensor]:
            def branch() -> tf.Tensor:
                done = run()
                with tf.control_dependencies([] if done is None else [done]):
                    return tf.constant(True)

            return branch

        return tf.group(
            tf.cond(
                is_reduced,
                after(apply_grads_closure),
                after(lambda: self._count(optimizer, kwargs)),
            )
        )

    def _count(self, optimizer: Any, options: dict[str, Any]) -> Any:
        step = options.get("global_step")
        if self.optimizer_type == self._OPTIMIZER_TYPE_KERAS:
            step = optimizer.iterations
        return None if step is None else tf.convert_to_tensor(step.assign_add(1))

    def _dense(self, grad: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if not self.sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step above 1 cannot add tf.IndexedSlices; use sparse_as_dense=True"
            )
        return tf.convert_to_tensor(grad)

    def _create(self, grads: Sequence[Any]) -> None:
        """Create the variables, once for all traces in which the helper is used."""
        if self.counter is None:
            self.counter = private_variable([], tf.int32, f"{self.name}aggregation_counter")
        for i, grad in enumerate(grads):
            if grad is not None and i not in self.locally_aggregated_grads:
                made = private_variable(
                    grad.shape, grad.dtype, f"{self.name}aggregated_gradient_{i}"
                )
                self.locally_aggregated_grads[i] = made

    def _reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        is_local = [id(variable) in self._local for variable in variables]
        if not any(is_local):
            return list(self.allreduce_grads(grads, list(variables)))
        shared = [None if local else g for g, local in zip(grads, is_local, strict=True)]
        reduced = list(self.allreduce_grads(shared, list(variables)))
        for i, local in enumerate(is_local):
            if local:
                grad = grads[i]
                is_scaled = self.scale_local_gradients and grad is not None
                reduced[i] = scale_local(grad, self.process_set) if is_scaled else grad
        return reduced


def private_variable(shape: Any, dtype: Any, name: str) -> Any:
    """A variable of zeros for internal use, created outside of the function that is being traced.

    In a graph of TensorFlow 1, ``local_variables_initializer`` initialises it, and checkpoints do not contain it."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)
        return tf.compat.v1.Variable(
            lambda: tf.zeros(shape, dtype),
            trainable=False,
            name=name,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
        )


def cond_list(
    condition: tf.Tensor,
    then: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """``tf.cond`` for branches that return lists. In graphs of TensorFlow 1, ``tf.cond`` unpacks a list of one
    tensor."""
    result = tf.cond(condition, then, otherwise)
    return list(result) if isinstance(result, (list, tuple)) else [result]
