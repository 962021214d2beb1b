"""``horoplug.tensorflow.keras``: with Keras 3, where it is horoplug.keras, and with Keras 2, which tf.keras is in
processes with TF_USE_LEGACY_KERAS=1. Includes sparse gradients, which only TensorFlow has."""

import importlib.util
import os

import numpy as np
import pytest

from horoplug.common.objects import allgather_object, broadcast_object
from tests.harness.checks import tensorflow_in_place
from tests.harness.keras_jobs import QUIET
from tests.harness.support import Pool, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow.keras")

pytest_plugins = ["tests.harness.keras_jobs"]

IS_LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
keras = tf.keras


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def pool(request):
    if not importlib.util.find_spec(request.param):
        pytest.skip(f"{request.param} is not installed")
    is_legacy = str(int(request.param == "tf_keras"))
    variables = {**QUIET, "KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": is_legacy}
    made = Pool(variables=variables, modules=["tensorflow", request.param])
    yield made
    made.close()


@pytest.fixture
def ranks(pool):
    with pool.ranks(2) as job:
        yield job


def make_model(optimizer, **options):
    keras.utils.set_random_seed(1)
    words = keras.Input((3,), dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(6, 2)(words))
    model = keras.Model(words, keras.layers.Dense(1)(embedded))
    model.compile(optimizer, loss="mse", **options)
    return model


def fit(model, x, y, batch, epochs=2, **options):
    return model.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options
    ).history


def fit_mine(model, x, y, batch, **options):
    rank, size = hvd.rank(), hvd.size()
    parts = [
        a.reshape(-1, size, batch // size, *a.shape[1:])[:, rank].reshape(-1, *a.shape[1:])
        for a in (x, y)
    ]
    return fit(model, *parts, batch // size, **options)


def assert_equals(model, weights, tolerance=1e-5):
    for value, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(value, expected, atol=tolerance)
    bits = [value.tobytes() for value in model.get_weights()]
    assert allgather_object(bits) == [bits] * hvd.size()


def alone(optimizer, *arguments):
    model = make_model(optimizer, run_eagerly=True)
    if hvd.rank() == 0:
        fit(model, *arguments)
    return broadcast_object(model.get_weights())


def check_fit(folder, key):
    """A model with an embedding, whose gradient is a tf.IndexedSlices."""
    assert keras.layers.Layer.__module__.startswith("tf_keras" if IS_LEGACY else "keras")
    random = np.random.default_rng(key)
    x = random.integers(0, 6, (32, 3)).astype("int32")
    y = x[:, :1].astype("float32")
    sgd = keras.optimizers.SGD

    expected = alone(sgd(0.1, momentum=0.9, clipnorm=0.5), x, y, 8)
    optimizer = hvd.DistributedOptimizer(sgd(0.1, momentum=0.9, clipnorm=0.5))
    model = make_model(optimizer)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = fit_mine(model, x, y, 8, callbacks=callbacks)
    assert_equals(model, expected)
    assert allgather_object(history["loss"])[0] == history["loss"]

    # Two batches of 4 equal one of 8; the remaining three start a new step.
    expected = alone(sgd(0.1), x, y, 8)
    model = make_model(
        hvd.DistributedOptimizer(
            sgd(0.1),
            sparse_as_dense=True,
            backward_passes_per_step=2,
            average_aggregated_gradients=True,
            groups=1,
        )
    )
    fit_mine(model, x, y, 4)
    assert_equals(model, expected)
    assert int(model.optimizer.iterations) == 16

    path = f"{folder}/model.{'h5' if IS_LEGACY else 'keras'}"
    model = make_model(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), run_eagerly=True)
    fit_mine(model, x, y, 8)
    if hvd.rank() == 0:
        model.save(path)
    broadcast_object(None)
    loaded = hvd.load_model(path)
    loaded.run_eagerly = True
    assert fit_mine(loaded, x, y, 8) == fit_mine(model, x, y, 8)
    assert_equals(loaded, model.get_weights(), 0)
    assert type(keras.models.load_model(path).optimizer) is loaded.optimizer.__class__


@pytest.mark.short
def test_fit_equals_training_on_one_rank(ranks, tmp_path):
    ranks.run(check_fit, str(tmp_path), seed())


def check_callbacks():
    """The callbacks of Keras 2 have another base class. Their behaviour is tested with Keras 3."""
    x, y = np.zeros((8, 3), "int32"), np.ones((8, 1), "float32")
    model = make_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    state = hvd.elastic.KerasState(model, epoch=0)
    rates = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1),
        See(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
    ]
    assert all(isinstance(callback, keras.callbacks.Callback) for callback in callbacks)
    fit(model, x, y, 4, epochs=2, callbacks=callbacks)
    np.testing.assert_allclose(rates, [0.075, 0.1, 0.05, 0.05], rtol=1e-6)
    assert state.epoch == 2
    committed = model.get_weights()
    fit(model, x, y, 4, epochs=1)
    state.restore()
    assert_equals(model, committed, 0)
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [2, 2]
    assert hvd.allreduce(model.weights[0]).shape == (6, 2)


@pytest.mark.short
def test_callbacks_of_both_keras_versions(ranks):
    ranks.run(check_callbacks)


@pytest.mark.parametrize(
    ("check", "arguments"), [(check, arguments) for check, *arguments in tensorflow_in_place.CHECKS]
)
def test_state_that_returns_to_no_commit(ranks, check, arguments):
    ranks.run(check, *arguments)
