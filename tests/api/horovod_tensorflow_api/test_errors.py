"""Mismatches between ranks, and invalid calls of one rank."""

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf

from tests.api.horovod_tensorflow_api.matrix import names_rank

FAILED = tf.errors.FailedPreconditionError


def operations():
    """The operations by name, each as a function of a tensor."""
    return {
        "allreduce": lambda t: hvd.allreduce(t, op=hvd.Sum),
        "grouped_allreduce": lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum),
        "allgather": hvd.allgather,
        "broadcast": lambda t: hvd.broadcast(t, 0),
        "alltoall": hvd.alltoall,
        "reducescatter": lambda t: hvd.reducescatter(t, op=hvd.Sum),
    }


@pytest.mark.parametrize("name", operations())
def test_different_shapes_are_an_error(evaluate, name):
    shape = [4 * hvd.size()] * 3
    shape[1] = 10 * (hvd.rank() + 1)
    with pytest.raises(FAILED) as error:
        evaluate(operations()[name](tf.ones(shape)))
    names_rank(error)


@pytest.mark.parametrize("name", operations())
def test_different_dtypes_are_an_error(evaluate, name):
    dtype = tf.int32 if hvd.rank() % 2 else tf.float32
    with pytest.raises(FAILED) as error:
        evaluate(operations()[name](tf.ones([4 * hvd.size()], dtype)))
    names_rank(error)


def test_different_ndim_is_an_error(evaluate):
    tensor = tf.ones([10] * (1 + hvd.rank()))
    with pytest.raises(FAILED):
        evaluate(hvd.allreduce(tensor, op=hvd.Sum))


def test_different_roots_are_an_error(evaluate):
    with pytest.raises(FAILED):
        evaluate(hvd.broadcast(tf.ones([17] * 3), hvd.rank()))


def test_device_placement_does_not_change_names(evaluate):
    with tf.device("/cpu:0"):
        total = hvd.allreduce(tf.ones(3), op=hvd.Sum, name="somewhere")
    assert evaluate(total).tolist() == [hvd.size()] * 3


def test_alltoall_refuses_indivisible_rows(evaluate):
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(hvd.alltoall(tf.ones([hvd.size() + 1])))


def test_alltoall_refuses_splits_beyond_the_rows(evaluate):
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(hvd.alltoall(tf.ones([hvd.size() - 1]), tf.ones([hvd.size()], tf.int32)))


def test_reducescatter_refuses_scalars(evaluate):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        evaluate(hvd.reducescatter(tf.constant(1.0)))


def test_job_continues_after_an_error(evaluate):
    with pytest.raises(FAILED):
        evaluate(hvd.allreduce(tf.ones(hvd.rank() + 1), op=hvd.Sum))
    assert evaluate(hvd.allreduce(tf.ones(2), op=hvd.Sum)).tolist() == [hvd.size()] * 2


def test_broadcast_global_variables_in_eager_mode_is_refused():
    with pytest.raises(RuntimeError):
        hvd.broadcast_global_variables(root_rank=0)


@pytest.mark.no_job
def test_operations_need_init():
    with pytest.raises(ValueError, match="init"):
        hvd.rank()
    with pytest.raises(ValueError, match="init"):
        hvd.size()
    with pytest.raises((ValueError, FAILED)):
        hvd.allreduce(tf.ones(2))
