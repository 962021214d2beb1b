"""Batch normalisation over the batches of all ranks, as a Keras layer.

The forward pass and the backward pass each need one allreduce of a few numbers per channel. The batches of the ranks
may differ in size and may be empty.
"""

from typing import Any

import tensorflow as tf

from horoplug.common.context import context
from horoplug.common.per_job import FirstUses, PerJob
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import Sum
from horoplug.tensorflow.library import do_not_convert
from horoplug.tensorflow.mpi_ops import allreduce

__all__ = ["SyncBatchNormalization"]

_LAYERS = PerJob(FirstUses)


@tf.keras.utils.register_keras_serializable(package="horoplug")  # type: ignore[misc,unused-ignore]
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``keras.layers.BatchNormalization`` with the mean and the variance over the batches of all ranks during training.

    In evaluation, on a single rank, and on ranks outside of the process set it is plain batch normalisation. The
    gradients of gamma and beta are local: the tape or the optimizer reduces them like all others.

    Every rank uses the same layers in the same order. ``process_set``: the ranks whose batches are used; by default
    all. ``fused`` is accepted for compatibility with Horovod; the other arguments (``kwargs``) are those of the Keras
    layer. Raises ValueError for ``fused=True``, and with a backend of Keras other than TensorFlow.

    Example, on two ranks:

        layer = hvd.SyncBatchNormalization(epsilon=0.0, center=False, scale=False)
        x = tf.constant([[4.0 * hvd.rank()]])  # one value on each rank; the mean is 2, the deviation 2
        layer(x, training=True)  # -> [[-1.0]] on rank 0, [[1.0]] on rank 1
    """

    def __init__(
        self,
        fused: bool | None = False,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True")
        if _is_keras_2():
            kwargs["fused"] = False
        elif tf.keras.config.backend() != "tensorflow":
            raise ValueError(
                "SyncBatchNormalization needs Keras with the TensorFlow backend, not "
                f"{tf.keras.config.backend()}"
            )
        super().__init__(**kwargs)
        self.process_set = process_set

    @do_not_convert
    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        context.connections()  # raises before init
        if self.process_set.size() == 1 or not self.process_set.included():
            mean, variance = super()._moments(inputs, *args, **kwargs)
            return mean, variance
        axes, keep_dims, mask = self._moments_options(*args, **kwargs)
        inputs = tf.convert_to_tensor(inputs)
        dtype = inputs.dtype
        wide = tf.cast(inputs, tf.float32) if dtype.size < 4 else inputs
        weights = _weights(wide, mask, axes)
        count = tf.reduce_sum(weights)
        # Squares of the deviations from this rank's mean: squares of the values would lose precision.
        mean = tf.reduce_sum(wide * weights, axes, keepdims=True) / tf.maximum(count, 1)
        squares = tf.reduce_sum(weights * (wide - mean) ** 2, axes)
        count, mean, squares = (
            tf.cast(tf.reshape(numbers, [-1]), tf.float64) for numbers in (count, mean, squares)
        )
        number = _LAYERS.get().number(self, process_set_id(self.process_set))
        with tf.name_scope(
            "sync_batch_norm/"
        ):  # an absolute scope, because the names of the layers' scopes may differ between ranks
            sums = allreduce(
                tf.concat([count, count * mean, squares + count * mean**2], 0),
                op=Sum,
                name=f"sync_batch_norm.{number}",
                process_set=self.process_set,
            )
        total, squares = tf.split(sums[1:], 2)
        mean = total / sums[0]
        variance = tf.maximum(squares / sums[0] - mean**2, 0)
        shape = [
            1 if axis in axes else length
            for axis, length in enumerate(inputs.shape)
            if keep_dims or axis not in axes
        ]
        return tf.cast(tf.reshape(mean, shape), dtype), tf.cast(tf.reshape(variance, shape), dtype)

    def _moments_options(
        self,
        mask_or_axes: Any = None,
        keep_dims: bool = False,
        mask: Any = None,
        reduction_axes: Any = None,
    ) -> tuple[list[int], bool, Any]:
        """The axes, whether to keep them as dimensions of size 1, and the mask, from the arguments of Keras 2 or 3."""
        if not _is_keras_2():
            return list(self._reduction_axes), False, mask if mask_or_axes is None else mask_or_axes
        return list(reduction_axes or mask_or_axes), keep_dims, mask


def _is_keras_2() -> bool:
    return not hasattr(tf.keras, "config")


def _weights(inputs: tf.Tensor, mask: Any, axes: list[int]) -> tf.Tensor:
    """The weight of each value, 0 or 1, in the shape of the inputs with one channel."""
    shape = tf.shape(inputs)
    ones = tf.ones([shape[a] if a in axes else 1 for a in range(inputs.shape.rank)], inputs.dtype)
    if mask is None:
        return ones
    missing = inputs.shape.rank - len(mask.shape)
    given = tf.reshape(tf.cast(mask, inputs.dtype), tf.concat([tf.shape(mask), [1] * missing], 0))
    return ones * given
