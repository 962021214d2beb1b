"""Dtypes and shapes that Horovod supports, and tensors with values that every dtype represents exactly."""

import itertools

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

REDUCED = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64]
MOVED = [*REDUCED, tf.uint16, tf.int16, tf.bool]
SCATTERED = [tf.int32, tf.int64, tf.float16, tf.float32, tf.float64]
FLOATS = [tf.float32, tf.float64]
NDIMS = [1, 2, 3]
INTEGERS = [tf.uint8, tf.int8, tf.int32, tf.int64]

REDUCED_CASES = list(itertools.product(REDUCED, NDIMS))
MOVED_CASES = list(itertools.product(MOVED, NDIMS))
FLOAT_CASES = list(itertools.product(FLOATS, NDIMS))


def whole(dtype, *shape, seed=1234, low=-100, high=100):
    """Whole numbers, the same on every rank, as a NumPy array."""
    if dtype in (tf.uint8, tf.int8):
        low, high = 0, 10
    numbers = np.random.default_rng(seed).integers(low, high, shape)
    return numbers.astype(dtype.as_numpy_dtype)


def cube(dtype, ndim, seed=1234):
    return whole(dtype, *[17] * ndim, seed=seed)


def filled(dtype, ndim, rank, rows=17):
    number = rank % 2 if dtype == tf.bool else rank
    return np.full((rows, *[17] * (ndim - 1)), number, dtype.as_numpy_dtype)


def scaled(array, factor):
    """``array * factor`` as Horovod computes it: integers in float64, then truncated, float16 in float32, others in
    their own dtype."""
    if array.dtype.kind in "iu":
        return (array.astype(np.float64) * factor).astype(array.dtype)
    if array.dtype == np.float16:
        return (array.astype(np.float32) * np.float32(factor)).astype(np.float16)
    return array * array.dtype.type(factor)


def equal(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert np.array_equal(actual, expected), (actual, expected)


def names_rank(error):
    """Whether the error text names a rank, as errors that all ranks get do."""
    assert any(f"rank {rank}" in str(error.value) for rank in range(hvd.size())) or "ranks" in str(
        error.value
    ), error.value
