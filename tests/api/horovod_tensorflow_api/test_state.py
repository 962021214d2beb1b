"""Elastic state, and batch normalisation over the ranks."""

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError


def through(state, variables, values, other):
    """Synchronise, restore and commit, as an elastic job does."""
    state.sync()
    assert all(np.array_equal(v, w) for v, w in zip(variables(), values, strict=True))
    assert (state.batch, state.epoch) == (20, 10)

    other()
    changed = [np.array(v) for v in variables()]
    state.batch, state.epoch = 21, 11
    state.restore()
    assert all(np.array_equal(v, w) for v, w in zip(variables(), values, strict=True))
    assert (state.batch, state.epoch) == (20, 10)

    other()
    state.batch, state.epoch = 21, 11
    state.commit()
    state.restore()
    assert all(np.array_equal(v, w) for v, w in zip(variables(), changed, strict=True))
    assert (state.batch, state.epoch) == (21, 11)


def test_tensorflow_state():
    value = 1.0 if hvd.rank() == 0 else 2.0
    variables = [tf.Variable(np.full([2, 2], value)), tf.Variable(np.full(2, value))]
    state = hvd.elastic.TensorFlowState(variables, batch=20 + hvd.rank(), epoch=10 + hvd.rank())

    def other():
        variables[0].assign([[1.0, 2.0], [3.0, 4.0]])
        variables[1].assign([0.0, 0.0])

    through(state, lambda: variables, [np.ones([2, 2]), np.ones(2)], other)


@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_keras_state(kind):
    value = 1.0 if hvd.rank() == 0 else 2.0
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, activation="softmax")])
    model.build((2, 2))
    model.set_weights([np.full([2, 2], value), np.full(2, value)])
    optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
    make = hvd_keras.elastic.KerasState if kind == "keras" else hvd.elastic.TensorFlowKerasState
    state = make(model, optimizer, batch=20 + hvd.rank(), epoch=10 + hvd.rank())

    def other():
        model.set_weights([np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros(2)])

    through(state, state.model.get_weights, [np.ones([2, 2]), np.ones(2)], other)


def test_elastic_run_restores_the_committed_state():
    """After a failure the committed state is restored."""
    variable = tf.Variable(0.0)
    state = hvd.elastic.TensorFlowState([variable], steps=0, failed=0)
    failures = []

    @hvd.elastic.run
    def train(state):
        while state.steps < 4:
            variable.assign_add(1.0)
            state.steps += 1
            if state.steps == 3 and not failures:
                failures.append(True)
                raise HorovodInternalError("on purpose")
            if state.steps == 2:
                state.commit()
        return float(variable.numpy())

    assert train(state) == 4.0
    assert failures


@pytest.mark.parametrize("channels", [2, 1])
def test_sync_batch_normalization_uses_the_whole_batch(channels):
    size, rank = hvd.size(), hvd.rank()
    rows = [[[r * k + c for c in range(channels)] for k in range(1, 5)] for r in range(size)]
    whole = tf.constant(rows, tf.float32)
    plain = tf.keras.layers.BatchNormalization(axis=1)
    synchronized = hvd.SyncBatchNormalization(axis=1)
    expected = plain(whole, training=True)
    result = synchronized(whole[rank : rank + 1], training=True)
    assert np.allclose(result, expected[rank : rank + 1], atol=1e-5)
    assert np.allclose(synchronized.moving_mean, plain.moving_mean, atol=1e-6)
    assert np.allclose(synchronized.moving_variance, plain.moving_variance, atol=1e-6)
