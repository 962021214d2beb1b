"""Operations on tensors, eagerly and in graphs."""

import itertools

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from tests.api.horovod_tensorflow_api.matrix import (
    MOVED,
    NDIMS,
    REDUCED,
    SCATTERED,
    cube,
    equal,
    filled,
    scaled,
    whole,
)

ROWS = [17, 32, 81, 12, 15, 23, 22]


def cases(dtypes):
    return itertools.product(dtypes, NDIMS)


def test_rank_and_size_as_tensors(evaluate):
    assert evaluate(hvd.rank_op()) == hvd.rank()
    assert evaluate(hvd.size_op()) == hvd.size()
    assert evaluate(hvd.local_rank_op()) == hvd.local_rank()
    assert evaluate(hvd.local_size_op()) == hvd.local_size()
    assert evaluate(hvd.process_set_included_op()) == 1


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_allreduce(evaluate, op):
    size = hvd.size()
    with tf.device("/cpu:0"):
        for dtype, ndim in cases(REDUCED):
            array = cube(dtype, ndim)
            expected = array
            if op == "Sum":
                expected = array * array.dtype.type(size)
            elif op == "Product":
                array = whole(dtype, *[17] * ndim, low=-3, high=4)
                expected = array**size
            result = hvd.allreduce(tf.constant(array), op=getattr(hvd, op))
            actual = evaluate(result)
            equal(actual.astype(array.dtype), expected.astype(array.dtype))


def test_allreduce_accepts_tensor_like_values(evaluate):
    size = hvd.size()
    assert evaluate(hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum)).tolist() == [size] * 3
    assert evaluate(hvd.allreduce([1.0, 2.0], op=hvd.Average)).tolist() == [1, 2]
    assert evaluate(hvd.allreduce(tf.constant(3.0), average=False)) == 3 * size
    assert evaluate(hvd.allreduce(tf.constant(3.0), average=True)) == 3
    with pytest.raises(ValueError, match="average"):
        hvd.allreduce(tf.constant(3.0), average=True, op=hvd.Sum)


def test_many_allreduces_in_flight(evaluate):
    """Horovod fuses these operations."""
    size = hvd.size()
    arrays = [cube(dtype, ndim) for dtype, ndim in cases(REDUCED)]
    results = evaluate([hvd.allreduce(tf.constant(a), op=hvd.Sum) for a in arrays])
    for array, result in zip(arrays, results, strict=True):
        equal(result, array * array.dtype.type(size))


@pytest.mark.parametrize("where", ["prescale_factor", "postscale_factor"])
def test_prescale_and_postscale_factors(evaluate, where):
    size = hvd.size()
    factor = np.random.default_rng(1).uniform()
    for dtype, ndim in cases([tf.int32, tf.int64, tf.float16, tf.float32]):
        array = cube(dtype, ndim)
        result = hvd.allreduce(tf.constant(array), op=hvd.Sum, **{where: factor})
        if where == "prescale_factor":
            expected = scaled(array, factor) * array.dtype.type(size)
        else:
            expected = scaled(array * array.dtype.type(size), factor)
        equal(evaluate(result), expected)


def test_grouped_allreduce(evaluate):
    size = hvd.size()
    for dtype, ndim in cases(REDUCED):
        arrays = [cube(dtype, ndim, seed) for seed in range(5)]
        results = hvd.grouped_allreduce([tf.constant(a) for a in arrays], op=hvd.Sum)
        assert len(results) == 5
        for array, result in zip(arrays, evaluate(results), strict=True):
            equal(result, array * array.dtype.type(size))


def test_allreduce_with_compression(evaluate):
    array = cube(tf.float32, 2)
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        equal(
            evaluate(hvd.allreduce(tf.constant(array), compression=compression, op=hvd.Average)),
            array,
        )
    for dtype in MOVED:
        compressed, context = hvd.Compression.fp16.compress(tf.ones([17] * 3, dtype))
        assert compressed.dtype == (tf.float16 if dtype.is_floating else dtype)
        assert hvd.Compression.fp16.decompress(compressed, context).dtype == dtype


def test_allreduce_of_indexed_slices(evaluate):
    """The ranks' rows are concatenated, and an average divides the values."""
    size, rank = hvd.size(), hvd.rank()
    slices = tf.IndexedSlices(tf.fill([2, 3], rank + 1.0), tf.constant([0, rank]), [7, 3])
    for op in (hvd.Sum, hvd.Average):
        result = hvd.allreduce(slices, op=op)
        values, indices = evaluate([result.values, result.indices])
        divisor = size if op == hvd.Average else 1
        expected = np.repeat([(r + 1.0) / divisor for r in range(size)], 2)
        assert np.allclose(values, expected[:, None] * np.ones(3))
        assert indices.tolist() == [i for r in range(size) for i in (0, r)]


@pytest.mark.parametrize("rows", ["equal", "different"])
def test_allgather(evaluate, rows):
    counts = ROWS[: hvd.size()] if rows == "different" else [17] * hvd.size()
    for dtype, ndim in cases(MOVED):
        tensor = tf.constant(filled(dtype, ndim, hvd.rank(), counts[hvd.rank()]))
        expected = np.concatenate([filled(dtype, ndim, r, c) for r, c in enumerate(counts)])
        equal(evaluate(hvd.allgather(tensor)), expected)


def test_grouped_allgather(evaluate):
    counts = ROWS[: hvd.size()]
    for dtype, ndim in cases(MOVED):
        tensor = tf.constant(filled(dtype, ndim, hvd.rank(), counts[hvd.rank()]))
        expected = np.concatenate([filled(dtype, ndim, r, c) for r, c in enumerate(counts)])
        for result in evaluate(hvd.grouped_allgather([tensor] * 5)):
            equal(result, expected)


def test_broadcast(evaluate):
    for dtype, ndim in cases(MOVED):
        for root in range(hvd.size()):
            tensor = tf.constant(filled(dtype, ndim, hvd.rank()))
            equal(evaluate(hvd.broadcast(tensor, root)), filled(dtype, ndim, root))


def test_alltoall_with_splits(evaluate):
    size, rank = hvd.size(), hvd.rank()
    for dtype, ndim in cases(MOVED[:-1]):
        array = np.repeat(np.arange(size), rank + 1)
        array = np.broadcast_to(
            array.reshape(-1, *[1] * (ndim - 1)), [len(array)] + [2] * (ndim - 1)
        )
        tensor = tf.constant(array.astype(dtype.as_numpy_dtype))
        splits = tf.constant([rank + 1] * size, tf.int32)
        collected, received = evaluate(list(hvd.alltoall(tensor, splits)))
        assert (collected == rank).all()
        assert len(collected) == size * (size + 1) // 2
        assert collected.dtype == dtype.as_numpy_dtype
        assert received.tolist() == [r + 1 for r in range(size)]


def test_alltoall_without_splits(evaluate):
    size, rank = hvd.size(), hvd.rank()
    tensor = tf.constant(np.repeat(np.arange(size, dtype=np.float32), 3))
    assert evaluate(hvd.alltoall(tensor)).tolist() == [rank] * (3 * size)
    empty = hvd.alltoall(tf.zeros([size, 0]))
    assert evaluate(empty).size == 0


def test_alltoall_with_empty_send_or_receive(evaluate):
    size, rank = hvd.size(), hvd.rank()
    # Rank 1 sends nothing.
    count = 0 if rank == 1 else rank + 1
    tensor = tf.constant(np.repeat(np.arange(size, dtype=np.int32), count))
    collected, _ = evaluate(list(hvd.alltoall(tensor, tf.constant([count] * size), name="a2a")))
    assert (collected == rank).all()
    assert len(collected) == sum(r + 1 for r in range(size) if r != 1)
    # Rank 0 receives nothing.
    splits = [0] + [rank + 1] * (size - 1)
    tensor = tf.constant(np.repeat(np.arange(size, dtype=np.int32), splits))
    collected, _ = evaluate(list(hvd.alltoall(tensor, tf.constant(splits), name="a2a_receive")))
    assert (collected == rank).all()
    assert len(collected) == (size * (size + 1) // 2 if rank else 0)


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter(evaluate, op):
    size, rank = hvd.size(), hvd.rank()
    for dtype, ndim in cases(SCATTERED):
        array = whole(dtype, *[4 * size] * ndim)
        expected = array[4 * rank : 4 * rank + 4]
        if op == "Sum":
            expected = expected * array.dtype.type(size)
        equal(evaluate(hvd.reducescatter(tf.constant(array), op=getattr(hvd, op))), expected)


def test_reducescatter_uneven_and_grouped(evaluate):
    size, rank = hvd.size(), hvd.rank()
    array = whole(tf.float32, size * 2 + 1, 3)
    first = rank * 2 + min(rank, 1)
    expected = array[first : first + 2 + (rank < 1)] * size
    results = hvd.grouped_reducescatter([tf.constant(array)] * 3, op=hvd.Sum)
    for result in evaluate(results):
        equal(result, expected)


def test_join_returns_the_last_rank():
    size, rank = hvd.size(), hvd.rank()
    for first in range(size):
        if rank == first:
            last = hvd.join()
        else:
            total = hvd.allreduce(tf.ones(5), op=hvd.Sum, name=f"joined{first}")
            assert total.numpy().tolist() == [size - 1] * 5
            last = hvd.join()
        assert int(last) != first
