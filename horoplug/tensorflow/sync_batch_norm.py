"""Batch normalisation over the batches of all ranks, as a layer of Keras.

One exchange of a few numbers per channel in the forward pass, and one in the backward pass. The ranks' batches may be
of different sizes, empty ones included.
"""

import itertools
import weakref
from typing import Any

import tensorflow as tf

from horoplug.common.context import context
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import Sum
from horoplug.tensorflow.library import as_written
from horoplug.tensorflow.mpi_ops import allreduce


@tf.keras.utils.register_keras_serializable(package="horoplug")  # type: ignore[misc,unused-ignore]
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``keras.layers.BatchNormalization`` with mean and variance of all ranks' batches together while it trains.

    In evaluation, on one rank, and on ranks outside of the process set it is plain batch normalisation. The gradients
    of gamma and beta are this rank's share: the tape or the optimizer reduces them like all others.

    Every rank uses the same layers in the same order. ``fused`` is accepted for Horovod's sake; other arguments are
    those of the layer of Keras. Raises ValueError for ``fused=True``, and with a backend of Keras other than
    TensorFlow."""

    def __init__(
        self,
        fused: bool | None = False,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if _is_keras_2():
            kwargs["fused"] = False
        elif tf.keras.config.backend() != "tensorflow":
            raise ValueError(
                "SyncBatchNormalization is for Keras with TensorFlow as its backend, not "
                f"{tf.keras.config.backend()}."
            )
        super().__init__(**kwargs)
        self.process_set = process_set

    @as_written
    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        context.mesh()  # raises before init
        if self.process_set.size() == 1 or not self.process_set.included():
            mean, variance = super()._moments(inputs, *args, **kwargs)
            return mean, variance
        axes, keep_dims, mask = self._asked(*args, **kwargs)
        inputs = tf.convert_to_tensor(inputs)
        kind = inputs.dtype
        wide = tf.cast(inputs, tf.float32) if kind.size < 4 else inputs
        weights = _weights(wide, mask, axes)
        count = tf.reduce_sum(weights)
        # Of the deviations from this rank's mean: sums of squares of the values themselves would lose digits.
        mean = tf.reduce_sum(wide * weights, axes, keepdims=True) / tf.maximum(count, 1)
        squares = tf.reduce_sum(weights * (wide - mean) ** 2, axes)
        count, mean, squares = (
            tf.cast(tf.reshape(numbers, [-1]), tf.float64) for numbers in (count, mean, squares)
        )
        with tf.name_scope("sync_batch_norm/"):  # instead of scopes that are called like layers
            sums = allreduce(
                tf.concat([count, count * mean, squares + count * mean**2], 0),
                op=Sum,
                name=f"sync_batch_norm.{self._number()}",
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
        return tf.cast(tf.reshape(mean, shape), kind), tf.cast(tf.reshape(variance, shape), kind)

    def _number(self) -> int:
        """The layer's number in the job, in the order of first use, which is the same on every rank. Its name need
        not be: that depends on what else a rank has made."""
        key = SyncBatchNormalization, process_set_id(self.process_set)
        numbers, unused = context.per_job.setdefault(
            key, (weakref.WeakKeyDictionary(), itertools.count())
        )
        if self not in numbers:
            numbers[self] = next(unused)
        return int(numbers[self])

    def _asked(
        self,
        mask_or_axes: Any = None,
        keep_dims: bool = False,
        mask: Any = None,
        reduction_axes: Any = None,
    ) -> tuple[list[int], bool, Any]:
        """From the arguments of either version of Keras: over which axes, whether these stay, and the mask."""
        if not _is_keras_2():
            return list(self._reduction_axes), False, mask if mask_or_axes is None else mask_or_axes
        return list(reduction_axes or mask_or_axes), keep_dims, mask


def _is_keras_2() -> bool:
    return not hasattr(tf.keras, "config")


def _weights(inputs: tf.Tensor, mask: Any, axes: list[int]) -> tf.Tensor:
    """How often each value counts: 0 or 1, in the shape of the inputs with one channel."""
    shape = tf.shape(inputs)
    ones = tf.ones([shape[a] if a in axes else 1 for a in range(inputs.shape.rank)], inputs.dtype)
    if mask is None:
        return ones
    missing = inputs.shape.rank - len(mask.shape)
    given = tf.reshape(tf.cast(mask, inputs.dtype), tf.concat([tf.shape(mask), [1] * missing], 0))
    return ones * given
