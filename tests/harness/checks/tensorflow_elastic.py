"""Elastic state of TensorFlow and Keras."""

import threading

import numpy as np
import pytest

from tests.harness.checks import elastic

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")


def check_run(compiled):
    elastic.check_run(
        hvd,
        lambda count: tf.ones(count),
        make_state=lambda: hvd.elastic.TensorFlowState([tf.Variable([float(hvd.rank())])], step=0),
        step=lambda state: state.variables[0].assign_add(hvd.allreduce(tf.ones([1]), op=hvd.Sum)),
        value=lambda state: state.variables[0].numpy().tolist(),
        compiled=tf.function if compiled else lambda operation: operation,
    )


def check_old_graph():
    rank = hvd.rank()
    with tf.Graph().as_default():
        variable = tf.Variable([float(rank), 5.0])
        more = variable.assign_add([1.0, 1.0])
        with pytest.raises(ValueError, match="session="):
            hvd.elastic.TensorFlowState()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(step=rank)
            read = lambda: session.run(variable).tolist()  # noqa: E731
            session.run(more)
            state.restore()
            assert read() == [rank, 5.0]
            state.sync()
            assert (read(), state.step) == ([0.0, 5.0], 0)
            session.run(more)
            state.restore()
            assert read() == [0.0, 5.0]
            session.run(more)
            state.save()
            session.run(more)
            state.restore()
            assert read() == [1.0, 6.0]
    other = tf.Graph()
    with other.as_default():
        assert not tf.compat.v1.global_variables()


def check_keras():
    rank = hvd.rank()
    tf.keras.utils.set_random_seed(rank)
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(inputs))
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    x = np.ones([4, 3], "float32") * (rank + 1)
    model.fit(x, x[:, :2], verbose=0)

    def values():
        of_optimizer = model.optimizer.variables
        if callable(of_optimizer):
            of_optimizer = of_optimizer()
        return [tf.convert_to_tensor(v).numpy().tolist() for v in [*model.variables, *of_optimizer]]

    state = hvd.elastic.TensorFlowKerasState(model, epoch=rank)
    before = values()
    assert len(before) > 6
    model.fit(x, x[:, :2], verbose=0)
    assert values() != before
    state.epoch = 7
    state.restore()
    assert (values(), state.epoch) == (before, rank)
    first = hvd.broadcast_object(before, 0)
    state.sync()
    assert (values(), state.epoch) == (first, 0)
    model.fit(x, x[:, :2], verbose=0)
    state.restore()
    assert values() == first

    made = {"generator": tf.random.Generator.from_seed(rank)}
    draw = {"generator": lambda: float(made["generator"].uniform([]))}
    if hasattr(getattr(tf.keras, "random", None), "SeedGenerator"):
        made["seeds"] = tf.keras.random.SeedGenerator(rank)
        draw["seeds"] = lambda: float(tf.keras.random.uniform([], seed=made["seeds"]))
    state = hvd.elastic.TensorFlowKerasState(model, **made)
    state.sync()
    drawn = {name: each() for name, each in draw.items()}
    assert drawn == hvd.broadcast_object(drawn, 0)
    state.restore()
    assert drawn == {name: each() for name, each in draw.items()}
    assert all(getattr(state, name) is each for name, each in made.items())
    with pytest.raises(ValueError, match=r"the attribute 'lock'\[1\], a lock, cannot be sent"):
        hvd.elastic.TensorFlowKerasState(model, lock=(1, threading.Lock())).sync()

    fresh = tf.keras.Sequential([tf.keras.layers.Dense(1)])  # has no variables yet
    optimizer = tf.keras.optimizers.SGD(0.1)
    state = hvd.elastic.TensorFlowKerasState(fresh, optimizer)
    fresh.build((None, 3))
    state.commit()
    kernel = tf.convert_to_tensor(fresh.variables[0]).numpy()
    fresh.variables[0].assign(kernel + 1)
    state.restore()
    np.testing.assert_array_equal(fresh.variables[0], kernel)
