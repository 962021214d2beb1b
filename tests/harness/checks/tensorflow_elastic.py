"""Elastic state of TensorFlow and Keras."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

OPERATIONS = {
    "allreduce": lambda x: hvd.allreduce(x),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, x])[0],
    "allgather": lambda x: hvd.allgather(x),
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": lambda x: hvd.alltoall(x),
    "reducescatter": lambda x: hvd.reducescatter(x),
    "mismatch": lambda x: hvd.allreduce(tf.ones(2 + hvd.rank()), name="mismatch"),
}


def check_run(compiled):
    size, rank = hvd.size(), hvd.rank()
    for kind, operation in OPERATIONS.items():
        fail = tf.function(operation) if compiled else operation
        variable, calls, resets = tf.Variable([float(rank)]), [], []
        state = hvd.elastic.TensorFlowState([variable], step=0)
        state.register_reset_callbacks([lambda r=resets: r.append(hvd.size())])

        @hvd.elastic.run
        def train(state, word, *, fail=fail, variable=variable, calls=calls, kind=kind):
            calls.append(state.step)
            while state.step < 4:
                variable.assign_add(hvd.allreduce(tf.ones([1]), op=hvd.Sum))
                if state.step == 2 and len(calls) == 1:
                    if rank == 0 and kind != "mismatch":
                        hvd.shutdown()
                        raise hvd.HorovodInternalError("made up")
                    fail(tf.ones(2))
                    raise AssertionError(f"{kind} did not fail")
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
            return word

        assert train(state, kind) == kind
        assert (calls, resets) == ([0, 2], [size])
        assert variable.numpy().tolist() == [4.0 * size], kind


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

    fresh = tf.keras.Sequential([tf.keras.layers.Dense(1)])  # has no variables yet
    optimizer = tf.keras.optimizers.SGD(0.1)
    state = hvd.elastic.TensorFlowKerasState(fresh, optimizer)
    fresh.build((None, 3))
    state.commit()
    kernel = tf.convert_to_tensor(fresh.variables[0]).numpy()
    fresh.variables[0].assign(kernel + 1)
    state.restore()
    np.testing.assert_array_equal(fresh.variables[0], kernel)
