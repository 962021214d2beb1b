"""Every operation on TensorFlow tensors, in eager mode and in graphs: dtypes, shapes, order, sparse tensors, errors."""

from unittest.mock import patch

import numpy as np
import pytest

import horoplug as plain
from tests.harness.cases import allreduce_test
from tests.harness.checks.tensorflow_ops import (
    both,
    check_allreduce,
    check_control_flow,
    check_data_movement,
    check_factors_names_and_queries,
    check_inputs,
    check_mismatches,
    check_names_between_frameworks,
    check_shapes_in_graphs,
    check_sparse,
    check_unused_results,
    error_of,
    same,
)
from tests.harness.checks.tensorflow_orders import check_any_order
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")
CastCompressor = pytest.importorskip("horoplug.tensorflow.compression").CastCompressor

pytest_plugins = ["tests.harness.jobs"]

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]

ranks = ranks_fixture("a", "aa", "ab", "aab")


test_allreduce = pytest.mark.short("aa-*-float32")(allreduce_test(check_allreduce, DTYPES))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-float32")
def test_every_operation_and_dtype(ranks, dtype):
    ranks.run(check_data_movement, dtype, seed())


def check_compression(key):
    """The core casts float32 to the same bits as TensorFlow, which casts for classes derived from a compressor."""
    x = tf.constant(np.random.default_rng([key, hvd.rank()]).normal(size=(50, 9)).astype("float32"))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        own = type("Own", (compression,), {})
        expected = hvd.allreduce(x, compression=own)
        wide = hvd.allreduce(tf.cast(x, tf.float64), compression=own)
        assert not np.array_equal(expected, hvd.allreduce(x)), "there is something to round"
        with patch.object(CastCompressor, "compress", side_effect=AssertionError):
            for reduce in both(lambda t, c=compression: hvd.allreduce(t, compression=c)):
                same(reduce(x), expected.numpy(), "float32")
        y, z = hvd.grouped_allreduce([x, tf.cast(x, tf.float64)], compression=compression)
        same(y, expected.numpy(), "float32")
        same(z, wide.numpy(), "float64")
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [
                tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, compression=c) * x)
                for c in (compression, own)
            ]
        np.testing.assert_array_equal(*[tape.gradient(loss, x) for loss in losses])


def test_core_casts_like_tensorflow(ranks):
    ranks.run(check_compression, seed())


def test_factors_names_and_queries(ranks):
    ranks.run(check_factors_names_and_queries)


def test_shapes_in_graphs(ranks):
    ranks.run(check_shapes_in_graphs)


def test_ranks_start_operations_in_different_orders(ranks):
    ranks.run(check_any_order, seed())


def test_unused_results_are_not_dropped(ranks):
    ranks.run(check_unused_results)


def test_loops_and_branches(ranks):
    ranks.run(check_control_flow)


def test_indexed_slices(ranks):
    ranks.run(check_sparse)


def test_frameworks_match_by_name(ranks):
    ranks.run(check_names_between_frameworks)


def check_process_sets():
    rank, size = hvd.rank(), hvd.size()
    last = hvd.add_process_set([size - 1])
    number = last.process_set_id
    for included in both(lambda: hvd.process_set_included_op(number)):
        assert included().numpy() == (rank == size - 1)
    assert hvd.size_op(number).numpy() == 1
    if rank == size - 1:
        for reduce in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=last)):
            assert reduce(tf.ones(2)).numpy().tolist() == [1, 1]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"not in process set {number}"):
            hvd.allreduce(tf.ones(2), process_set=last)
    hvd.remove_process_set(last)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not exist"):
        hvd.size_op(number)


@pytest.mark.short
def test_operations_on_process_sets(pool):
    with pool.ranks(2) as job:
        job.run(check_process_sets)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.short(failure=True)
def test_mismatch_is_reported_and_the_job_continues(pool):
    with pool.ranks(2) as job:
        job.run(check_mismatches)


def test_inputs_that_are_no_tensors_are_refused(pool):
    with pool.ranks(1) as job:
        job.run(check_inputs)


def check_refusals():
    size = hvd.size()
    x = tf.ones([4, 3])
    wrong = tf.errors.InvalidArgumentError
    error_of(wrong, "bool has no average|bool tensors", lambda: hvd.allreduce(x > 0))
    error_of(wrong, "at least one dimension", lambda: hvd.reducescatter(1.0))
    error_of(wrong, "first dimension", lambda: hvd.alltoall(1.0))
    error_of(wrong, "one for each rank", lambda: hvd.alltoall(x, [1] * (size + 1)))
    error_of(wrong, "negative", lambda: hvd.alltoall(x, [-1] + [1] * (size - 1)))
    error_of(wrong, "root rank 9", lambda: hvd.broadcast(x, 9))
    error_of(ValueError, "supersedes", lambda: hvd.allreduce(x, average=True, op=hvd.Sum))
    error_of(ValueError, "not Max", lambda: hvd.reducescatter(x, op=hvd.Max))
    error_of(TypeError, "takes a list", lambda: hvd.grouped_allreduce(x))
    error_of(ValueError, "at least one", lambda: hvd.grouped_allgather([]))

    assert (hvd.allreduce(x).numpy() == 1).all()


def test_invalid_calls_raise(pool):
    with pool.ranks(1) as job:
        job.run(check_refusals)


def check_name_in_flight():
    x = tf.ones(2)
    if hvd.rank() == 0:
        handle = plain.allreduce_async(np.ones(2, np.float32), name="same")
        for again in both(lambda: hvd.allreduce(x, name="same")):
            error_of(tf.errors.InvalidArgumentError, "allreduce.same.*still in flight", again)
        plain.barrier()
        plain.synchronize(handle)
    else:
        plain.barrier()
        plain.allreduce(np.ones(2, np.float32), name="same")


def test_duplicate_name_is_refused(pool):
    with pool.ranks(2) as job:
        job.run(check_name_in_flight)


def check_names_that_come_again():
    """Operations under one name that differ in everything else."""
    size = hvd.size()
    for shape in ([3], [2, 3], [3], []):
        for dtype in ("float32", "int32"):
            x = tf.ones(shape, dtype)
            for op, expected in ((hvd.Sum, size), (hvd.Min, 1), (hvd.Sum, size)):
                same(hvd.allreduce(x, op=op, name="again"), np.full(shape, expected), dtype)
        for factor in (2.0, 1.0, 0.5):
            made = hvd.allreduce(tf.ones(shape), op=hvd.Sum, name="again", prescale_factor=factor)
            same(made, np.full(shape, size * factor), "float32")
        for root in range(size):
            made = hvd.broadcast(tf.fill(shape, hvd.rank()), root, name="again")
            same(made, np.full(shape, root), "int32")


def test_a_name_comes_again_with_another_operation(ranks):
    ranks.run(check_names_that_come_again)


def check_job():
    """A graph can be used in several jobs."""
    total, run = both(lambda x: hvd.allreduce(x, op=hvd.Sum) + tf.cast(hvd.size_op(), x.dtype))
    run.get_concrete_function(tf.TensorSpec([2]))
    for turn in range(4):
        size = hvd.size()
        for function in (total, run):
            assert function(tf.ones(2)).numpy().tolist() == [2.0 * size] * 2
        hvd.shutdown()
        for function in (total, run):
            error_of(
                tf.errors.FailedPreconditionError,
                "not been initialized",
                lambda f=function: f(tf.ones(2)),
            )
        if turn < 3:
            hvd.init()


def test_graph_in_several_jobs(pool):
    with pool.ranks(2) as job:
        job.run(check_job)
