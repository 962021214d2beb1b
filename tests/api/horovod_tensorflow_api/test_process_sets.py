"""Operations, tapes and objects in process sets."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from horovod.runner.common.util.env import get_env_rank_and_size

from tests.api.horovod_tensorflow_api.matrix import MOVED, REDUCED, cube, equal, filled

pytestmark = pytest.mark.no_job


@pytest.fixture(autouse=True)
def job():
    _, size = get_env_rank_and_size()
    sets = [hvd.ProcessSet([r for r in range(size) if r % 2 == part]) for part in (0, 1)]
    hvd.init(process_sets=sets)
    yield sets
    hvd.allgather_object(None)
    hvd.shutdown()


@pytest.fixture
def own(job):
    """The process set that contains this rank."""
    return job[hvd.rank() % 2]


@pytest.fixture
def other(job):
    return job[1 - hvd.rank() % 2]


def test_rank_and_size_of_process_sets(evaluate, own, other):
    assert evaluate(hvd.size_op(process_set_id=own.process_set_id)) == own.size()
    assert evaluate(hvd.size_op(process_set_id=other.process_set_id)) == other.size()
    assert evaluate(hvd.process_set_included_op(own.process_set_id)) == 1
    assert evaluate(hvd.process_set_included_op(other.process_set_id)) == 0


def test_allreduce_in_a_process_set(evaluate, own):
    for dtype in REDUCED:
        array = cube(dtype, 2)
        expected = array * array.dtype.type(own.size())
        equal(evaluate(hvd.allreduce(tf.constant(array), average=False, process_set=own)), expected)
        group = hvd.grouped_allreduce([tf.constant(array)] * 5, average=False, process_set=own)
        for result in evaluate(group):
            equal(result, expected)


def test_allgather_and_broadcast_in_a_process_set(evaluate, own):
    for dtype in MOVED:
        tensor = tf.constant(filled(dtype, 2, hvd.rank()))
        expected = np.concatenate([filled(dtype, 2, rank) for rank in own.ranks])
        equal(evaluate(hvd.allgather(tensor, process_set=own)), expected)
        for result in evaluate(hvd.grouped_allgather([tensor] * 2, process_set=own)):
            equal(result, expected)
        for root in own.ranks:
            result = evaluate(hvd.broadcast(tensor, root, process_set=own))
            equal(result, filled(dtype, 2, root))


def test_alltoall_in_a_process_set(evaluate, own):
    rank, size = hvd.rank(), own.size()
    tensor = tf.constant(np.repeat(np.array(own.ranks, np.int32), rank + 1))
    splits = tf.constant([rank + 1] * size)
    collected, received = evaluate(list(hvd.alltoall(tensor, splits, process_set=own)))
    assert (collected == rank).all()
    assert received.tolist() == [r + 1 for r in own.ranks]


def test_reducescatter_in_a_process_set(evaluate, own):
    size, place = own.size(), own.rank()
    array = cube(tf.float32, 2)[: 4 * size]
    for op in (hvd.Sum, hvd.Average):
        expected = array[4 * place : 4 * place + 4] * (size if op == hvd.Sum else 1)
        equal(evaluate(hvd.reducescatter(tf.constant(array), op=op, process_set=own)), expected)


def test_operations_on_a_rank_outside_the_set_are_refused(evaluate, other):
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(hvd.allreduce(tf.ones(4), process_set=other))
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 10
    with pytest.raises(ValueError, match="10"):
        evaluate(hvd.allreduce(tf.ones(4), process_set=unknown))


def test_variables_and_objects_in_a_process_set(own):
    root = own.ranks[0]
    variable = tf.Variable([hvd.rank()])
    hvd.broadcast_variables([variable], root_rank=root, process_set=own)
    assert variable.numpy().tolist() == [root]
    text = f"of {root}"
    obj = text if hvd.rank() == root else None
    assert hvd.broadcast_object(obj, root_rank=root, process_set=own) == text
    assert hvd.allgather_object(hvd.rank(), process_set=own) == own.ranks


def test_distributed_tape_in_a_process_set(evaluate, job):
    """Ranks outside of the set keep their gradients."""
    even = job[0]
    x = tf.constant(float(hvd.rank()))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    (gradient,) = hvd.DistributedGradientTape(tape, process_set=even).gradient(y, [x])
    value = evaluate(gradient)
    if even.included():
        assert np.isclose(value, 2.0 * sum(even.ranks) / even.size())
    else:
        assert value == 2.0 * hvd.rank()
