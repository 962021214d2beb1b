"""Gradients of the operations."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from tests.api.horovod_tensorflow_api.matrix import FLOATS, NDIMS

CASES = [(dtype, ndim) for dtype in FLOATS for ndim in NDIMS]


def gradient(function, array, outer=None):
    """The gradient of a function of a tensor; `outer` is the gradient of the result. Always float32."""
    if tf.executing_eagerly():
        variable = tf.Variable(array)
        with tf.GradientTape() as tape:
            result = function(variable)
        return tape.gradient(result, variable, outer)
    tensor = tf.constant(array)
    return tf.gradients(function(tensor), tensor, outer)[0]


def ones(dtype, ndim, rows=5):
    return np.ones([rows] + [5] * (ndim - 1), dtype.as_numpy_dtype)


def test_allreduce_gradient(evaluate):
    for dtype, ndim in CASES:
        array = ones(dtype, ndim)
        for op, factor in ((hvd.Sum, hvd.size()), (hvd.Average, 1)):
            outer = tf.ones_like(array)
            grad = gradient(lambda t, op=op: hvd.allreduce(t, op=op), array, outer)
            assert np.array_equal(evaluate(grad), array * factor)


def test_grouped_allreduce_gradient(evaluate):
    for dtype, ndim in CASES:
        arrays = [ones(dtype, ndim) * n for n in range(5)]

        def function(tensor, arrays=arrays):
            results = hvd.grouped_allreduce([tensor, *arrays[1:]], op=hvd.Sum)
            return results[0]

        grad = gradient(function, arrays[0], tf.ones_like(arrays[0]))
        assert np.array_equal(evaluate(grad), ones(dtype, ndim) * hvd.size())


@pytest.mark.parametrize("grouped", [False, True])
def test_allgather_gradient(evaluate, grouped):
    rows = [3, 2, 7, 4, 6, 8, 10][: hvd.size()]
    for dtype, ndim in CASES:
        array = ones(dtype, ndim, rows[hvd.rank()])
        outer = tf.constant(np.concatenate([ones(dtype, ndim, n) * r for r, n in enumerate(rows)]))

        def function(tensor):
            return hvd.grouped_allgather([tensor])[0] if grouped else hvd.allgather(tensor)

        assert np.array_equal(evaluate(gradient(function, array, outer)), array * hvd.rank())


def test_broadcast_gradient(evaluate):
    for dtype, ndim in CASES:
        array = ones(dtype, ndim)
        for root in range(hvd.size()):
            grad = gradient(lambda t, root=root: hvd.broadcast(t, root), array, tf.ones_like(array))
            assert np.array_equal(evaluate(grad), array * (hvd.rank() == root))


def test_alltoall_gradient(evaluate):
    size, rank = hvd.size(), hvd.rank()
    for dtype, ndim in CASES:
        array = ones(dtype, ndim, size * (rank + 1))
        splits = tf.constant([rank + 1] * size)
        grad = gradient(lambda t, splits=splits: hvd.alltoall(t, splits)[0], array)
        assert np.array_equal(evaluate(grad), array)
        array = ones(dtype, ndim, size * 2)
        assert np.array_equal(evaluate(gradient(hvd.alltoall, array)), array)


def test_reducescatter_gradient(evaluate):
    size = hvd.size()
    for dtype, ndim in CASES:
        array = ones(dtype, ndim, 4 * size)
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            grad = gradient(lambda t, op=op: hvd.reducescatter(t, op=op), array)
            assert np.array_equal(evaluate(grad), array * factor)
            grad = gradient(lambda t, op=op: hvd.grouped_reducescatter([t, t], op=op)[1], array)
            assert np.array_equal(evaluate(grad), array * factor)


def test_gradients_of_another_dtype_are_accepted(evaluate):
    """The gradient of a float64 tensor may be float32, as in older programs."""
    array = np.ones(5)
    splits = tf.ones([hvd.size()], tf.int32)
    functions = [
        lambda t: hvd.allreduce(t, op=hvd.Average),
        lambda t: hvd.alltoall(t[: hvd.size()], splits)[0],
    ]
    for function in functions[:1]:
        assert evaluate(gradient(function, array, tf.ones([5]))).tolist() == [1] * 5
