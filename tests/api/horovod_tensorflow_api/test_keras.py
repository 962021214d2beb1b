"""Keras' optimizers, callbacks and saved models."""

import horovod.keras as hvd_keras
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.runner.common.util.env import get_env_rank_and_size


class Adding(keras.optimizers.Optimizer):
    """An optimizer that adds gradients to variables."""

    def __init__(self, learning_rate=1.0, name="adding", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_add(variable, gradient)


def dense_model(optimizer, **options):
    model = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dense(2),
            keras.layers.RepeatVector(3),
            keras.layers.TimeDistributed(keras.layers.Dense(3)),
        ]
    )
    model.compile(
        loss="mse", optimizer=optimizer, metrics=[keras.metrics.categorical_accuracy], **options
    )
    return model


def batch(seed=0, rows=1):
    numbers = np.random.default_rng(seed + hvd.rank())
    return numbers.random((rows, 3), np.float32), numbers.random((rows, 3, 3), np.float32)


def test_optimizer_keeps_class_and_configuration():
    optimizer = keras.optimizers.Adam(0.003, weight_decay=0.1)
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert type(wrapped).__name__ == "Adam"
    config = wrapped.get_config()
    assert config["weight_decay"] == 0.1
    assert wrapped.from_config(config).get_config() == config
    assert type(wrapped).from_config(config).get_config() == config


@pytest.mark.parametrize("module", [hvd, hvd_keras], ids=["tensorflow.keras", "keras"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_training_keeps_weights_equal_on_all_ranks(module, run_eagerly):
    keras.utils.set_random_seed(1)
    model = dense_model(
        module.DistributedOptimizer(keras.optimizers.Adam(0.01)), run_eagerly=run_eagerly
    )
    for step in range(3):
        model.train_on_batch(*batch(step, 4))
    flat = np.concatenate([w.ravel() for w in model.get_weights()])
    gathered = hvd.allgather(flat[None])
    assert np.all(np.asarray(gathered) == flat)


def test_optimizer_with_sparse_gradients():
    for passes in (1, 2):
        model = keras.Sequential([keras.layers.Embedding(50, 4)])
        optimizer = keras.optimizers.RMSprop(0.0001)
        model.compile(
            loss="mse",
            optimizer=hvd.DistributedOptimizer(
                optimizer, sparse_as_dense=True, backward_passes_per_step=passes
            ),
        )
        numbers = np.random.default_rng(hvd.rank())
        for _ in range(3):
            model.train_on_batch(numbers.integers(0, 50, (8, 10)), numbers.random((8, 10, 4)))


@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_per_step(average):
    passes, steps = 4, 10
    optimizer = hvd.DistributedOptimizer(
        Adding(), backward_passes_per_step=passes, average_aggregated_gradients=average
    )
    x, y = keras.Variable([0.0]), keras.Variable([1.0, 2.0])
    optimizer.build([x, y])

    @tf.function
    def step():
        optimizer.apply([tf.ones(1) * (hvd.rank() + 1), tf.constant([-1.0, 0.0])], [x, y])

    for number in range(steps):
        step()
        applied = (number + 1) // passes * (1 if average else passes)
        assert np.allclose(x, applied * (hvd.size() + 1) / 2)
        assert np.allclose(y, [1.0 - applied, 2.0])


def test_apply_gradients_in_a_process_set():
    hvd.shutdown()
    _, size = get_env_rank_and_size()
    even = hvd.ProcessSet(range(0, size, 2))
    hvd.init(process_sets=[even, hvd.ProcessSet(range(1, size, 2))])
    optimizer = hvd.DistributedOptimizer(Adding(), process_set=even)
    x = keras.Variable([0.0])
    optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), x)])
    expected = sum(even.ranks) / even.size() if even.included() else hvd.rank()
    assert np.allclose(x, expected)


@pytest.mark.parametrize("scale", [True, False])
def test_local_variables_are_not_reduced(scale):
    optimizer = hvd.DistributedOptimizer(Adding(), scale_local_gradients=scale)
    own, shared = keras.Variable([0.0]), keras.Variable([0.0])
    optimizer.register_local_var(own)
    gradient = tf.constant([hvd.rank() + 1.0])
    optimizer.apply_gradients([(gradient, own), (gradient, shared)])
    assert np.allclose(own, (hvd.rank() + 1) / (hvd.size() if scale else 1))
    assert np.allclose(shared, (hvd.size() + 1) / 2)


def test_partial_optimizer():
    model = dense_model("sgd")
    local = model.layers[:1]
    optimizer = hvd_keras.PartialDistributedOptimizer(Adding(), local_layers=local)
    before = model.get_weights()
    gradients = [tf.fill(v.shape, hvd.rank() + 1.0) for v in model.trainable_variables]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    for place, (old, new) in enumerate(zip(before, model.get_weights(), strict=True)):
        expected = (hvd.rank() + 1) / hvd.size() if place < 2 else (hvd.size() + 1) / 2
        assert np.allclose(new - old, expected, atol=1e-6)


def check_same(optimizer, other):
    assert len(optimizer.variables) == len(other.variables)
    for a, b in zip(optimizer.variables, other.variables, strict=True):
        assert np.array_equal(a, b)


class Own(keras.optimizers.RMSprop):
    """A user-defined optimizer."""


@pytest.mark.parametrize("module", [hvd, hvd_keras], ids=["tensorflow.keras", "keras"])
def test_load_model_wraps_the_optimizer(module, tmp_path):
    model = dense_model(module.DistributedOptimizer(keras.optimizers.RMSprop(0.0001)))
    model.train_on_batch(*batch())
    model.save(tmp_path / "model.keras")
    loaded = module.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer).__name__ == "RMSprop"
    assert np.isclose(loaded.optimizer.learning_rate, 0.0001)
    check_same(model.optimizer, loaded.optimizer)
    # The loaded optimizer reduces gradients.
    loaded.train_on_batch(*batch(1))
    model.train_on_batch(*batch(1))
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert np.allclose(a, b)
    # Keras can load the model without horovod.
    assert (
        type(keras.models.load_model(tmp_path / "model.keras").optimizer)
        is keras.optimizers.RMSprop
    )


def test_load_model_with_custom_optimizers(tmp_path):
    model = dense_model(hvd.DistributedOptimizer(Own(0.0001)))
    model.train_on_batch(*batch())
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Own])
    assert type(loaded.optimizer).__name__ == "Own"
    check_same(model.optimizer, loaded.optimizer)
    loaded = hvd.load_model(
        tmp_path / "model.keras",
        custom_objects={"Own": Own},
    )
    assert type(loaded.optimizer).__name__ == "Own"
    check_same(model.optimizer, loaded.optimizer)


def test_keras_callbacks():
    initial = 0.1 * hvd.size()
    seen = []

    class Store(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(initial, momentum=0.9))
    model = dense_model(optimizer)
    schedule = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=initial, warmup_epochs=5),
        hvd.callbacks.LearningRateScheduleCallback(
            initial_lr=initial, multiplier=1e-1, start_epoch=5, end_epoch=10
        ),
        hvd.callbacks.LearningRateScheduleCallback(
            initial_lr=initial, multiplier=1e-2, start_epoch=10, end_epoch=15
        ),
        hvd.callbacks.LearningRateScheduleCallback(
            initial_lr=initial, multiplier=lambda epoch: 1e-3 * epoch, start_epoch=15, end_epoch=20
        ),
        Store(),
    ]
    x, y = batch(rows=10)
    history = model.fit(
        x, y, steps_per_epoch=5, batch_size=2, callbacks=schedule, epochs=20, verbose=0
    )
    assert all(rate <= initial * 1.0001 for rate in seen[:5])
    assert np.isclose(seen[4], initial)
    assert np.allclose(seen[5:10], initial * 1e-1)
    assert np.allclose(seen[10:15], initial * 1e-2)
    assert np.allclose(seen[15:], [initial * 1e-3 * epoch for epoch in range(15, 20)])
    losses = np.array(history.history["loss"])
    assert np.all(np.asarray(hvd.allgather(losses[None])) == losses)
    flat = np.concatenate([w.ravel() for w in model.get_weights()])
    assert np.all(np.asarray(hvd.allgather(flat[None])) == flat)


def test_broadcast_callback_with_local_variables():
    root = hvd.size() - 1
    fill = keras.initializers.Constant(hvd.rank())
    layers = [
        keras.layers.Dense(3, kernel_initializer=fill, bias_initializer=fill, trainable=False)
        for _ in range(3)
    ]
    model = keras.Sequential([keras.layers.Input((3,)), *layers])
    model.compile(loss="mse")
    local = list(layers[0].variables)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root, local_variables=local)
    model.fit(np.ones((1, 3)), np.ones((1, 3)), callbacks=[callback], verbose=0)
    for layer in layers:
        expected = hvd.rank() if layer is layers[0] else root
        assert all(np.all(np.asarray(v) == expected) for v in layer.variables)


def test_keras_functions_on_values():
    size, rank = hvd.size(), hvd.rank()
    for module in (hvd, hvd_keras):
        assert np.allclose(module.allreduce(np.float32(rank), op=hvd.Sum), size * (size - 1) / 2)
        assert np.allclose(module.allreduce(3.0), 3.0)
        assert np.asarray(module.allgather(np.array([rank]))).tolist() == [*range(size)]
        assert np.asarray(module.broadcast(np.array([rank]), 0)).tolist() == [0]
        shares = module.reducescatter(np.ones(2 * size, np.float32), op=hvd.Sum)
        assert np.asarray(shares).tolist() == [size] * 2
