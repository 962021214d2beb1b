"""``fit`` on several ranks, with each Keras backend, compared with one process that has all the data."""

import warnings
import zipfile
from unittest import mock

import numpy as np
import pytest

from horoplug.common.objects import allgather_object, broadcast_object
from tests.harness.checks.keras import (
    BATCH,
    ROWS,
    adam,
    assert_same_bits,
    fit,
    fit_mine,
    make_data,
    make_model,
    mine,
    sgd,
)
from tests.harness.support import seed

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("horoplug.keras")

pytest_plugins = ["tests.harness.keras_jobs"]


# Eager mode is faster for a few steps of TensorFlow.
FAST = {"run_eagerly": keras.backend.backend() == "tensorflow"}


# ---- fit ------------------------------------------------------------------------------------------------------------


def alone(make, x, y, epochs=2, batch=BATCH):
    """The weights after training in one process with all the data. Rank 0 trains and broadcasts them."""
    model = make_model(make(), **FAST)
    if hvd.rank() == 0:
        fit(model, x, y, batch, epochs)
    return broadcast_object(model.get_weights())


def distance(weights, others):
    return max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))


def check_fit(key):
    x, y = make_data(key)
    for _ in range(hvd.rank()):
        sgd()  # Keras numbers the optimizers of a process in their names
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    eager = {"run_eagerly": True}
    # JAX compiles every operation of an eager step separately, which takes long, so that it runs only one such case.
    usually_eager = {"run_eagerly": keras.backend.backend() != "jax"}
    cases = [
        (lambda: adam(clipnorm=0.05, use_ema=True, ema_overwrite_frequency=2), {}, {"groups": 2}),
        (lambda: sgd(schedule, global_clipnorm=0.1, gradient_accumulation_steps=3), {}, {}),
        (
            lambda: sgd(gradient_accumulation_steps=3, momentum=0.9, nesterov=True),
            usually_eager,
            {},
        ),
        (lambda: sgd(clipvalue=0.01), eager, {"gradient_predivide_factor": 2.0}),
        (lambda: keras.optimizers.LossScaleOptimizer(adam()), FAST, {}),
    ]
    for make, compiling, options in cases:
        together = make_model(hvd.DistributedOptimizer(make(), **options), **compiling)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        history = fit_mine(together, x, y, callbacks=callbacks)
        assert_same_bits(together)
        assert distance(alone(make, x, y), together.get_weights()) < 1e-5
        losses = allgather_object(history.history["loss"])
        assert losses[0] != losses[1]


@pytest.mark.short
def test_fit_equals_training_on_one_rank(keras_ranks):
    keras_ranks.run(check_fit, seed(), timeout=110)


def check_compression_and_op(key):
    x, y = make_data(key)
    expected = alone(lambda: sgd(0.01), x, y)
    sums = make_model(hvd.DistributedOptimizer(sgd(0.01 / hvd.size()), op=hvd.Sum), **FAST)
    fit_mine(sums, x, y)
    assert distance(expected, sums.get_weights()) < 1e-5
    narrow = make_model(sgd(), **FAST)
    groups = [narrow.trainable_variables[:1], narrow.trainable_variables[1:3]]
    options = {"compression": hvd.Compression.bf16, "groups": groups, "name": "mine"}
    narrow.compile(hvd.DistributedOptimizer(sgd(0.01), **options), loss="mse", **FAST)
    fit_mine(narrow, x, y)
    assert_same_bits(narrow)
    assert 1e-6 < distance(expected, narrow.get_weights()) < 1e-2
    adasum = make_model(hvd.DistributedOptimizer(sgd(0.01), op=hvd.Adasum), **FAST)
    fit_mine(adasum, x, y)
    assert_same_bits(adasum)


def test_compression_and_op(keras_ranks):
    keras_ranks.run(check_compression_and_op, seed())


def check_gpu_without_xla():
    """With a GPU, jit_compile="auto" means True: models with distributed optimizers run without it, with a warning."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    x, y = make_data(3)
    wrapped, bare = make_model(hvd.DistributedOptimizer(sgd())), make_model(sgd())
    gpu = tf.config.LogicalDevice("/device:GPU:0", "GPU")
    devices = mock.Mock(return_value=[gpu])
    with mock.patch.multiple(
        tf.config, list_physical_devices=devices, list_logical_devices=devices
    ):
        for chosen in ("auto", True):
            bare.compile(sgd(), loss="mse", jit_compile=chosen)
            assert bare.jit_compile
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                wrapped.compile(hvd.DistributedOptimizer(sgd()), loss="mse", jit_compile=chosen)
                fit_mine(wrapped, x, y)
            assert len([w for w in caught if "jit_compile=False" in str(w.message)]) == 1
            assert not wrapped.jit_compile
            assert_same_bits(wrapped)
            wrapped = make_model(sgd())
    wrapped.compile(hvd.DistributedOptimizer(sgd()), loss="mse", jit_compile=True)
    assert wrapped.jit_compile


def test_jit_compile_is_disabled_on_gpus(keras_ranks):
    keras_ranks.run(check_gpu_without_xla)


def check_loss_scale():
    """``compile`` wraps the optimizer in a LossScaleOptimizer, and only the gradients of rank 1 are not finite."""
    x, y = make_data(0)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model(hvd.DistributedOptimizer(sgd(0.01)))
        model.optimizer.initial_scale = 4.0  # small enough for float16
    finally:
        keras.config.set_dtype_policy("float32")
    fit_mine(model, x, y, epochs=1)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert int(model.optimizer.iterations) == ROWS // BATCH
    before = model.get_weights()
    y = y if hvd.rank() == 0 else np.full_like(y, 1e38)
    fit(model, x[:4], y[:4], 4, epochs=1)
    assert float(model.optimizer.dynamic_scale) == 2.0
    assert int(model.optimizer.iterations) == ROWS // BATCH
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert_same_bits(model)


def test_ranks_skip_the_same_steps(keras_ranks):
    keras_ranks.run(check_loss_scale)


# ---- local layers and process sets ----------------------------------------------------------------------------------


def check_local_layers(key):
    """The first layer uses local gradients, divided by the number of ranks or not."""
    x, y = make_data(key)
    x, y = x[:BATCH], y[:BATCH]
    own = make_model(sgd(), **FAST)
    start = own.get_weights()
    fit(own, *mine(x, y), BATCH // hvd.size(), epochs=1)
    expected = alone(sgd, x, y, epochs=1)
    for scale in (True, False):
        together = make_model(sgd())
        optimizer = hvd.PartialDistributedOptimizer(
            sgd(), local_layers=together.layers[0], scale_local_gradients=scale
        )
        together.compile(optimizer, loss="mse", **FAST)
        fit_mine(together, x, y, epochs=1)
        found = together.get_weights()
        divisor = hvd.size() if scale else 1
        for i in range(2):
            step = (own.get_weights()[i] - start[i]) / divisor
            np.testing.assert_allclose(found[i], start[i] + step, atol=1e-6)
        assert distance(expected[2:], found[2:]) < 1e-6
        kernels = allgather_object(found[0].tobytes())
        assert kernels[0] != kernels[1]


@pytest.mark.short("jax")
def test_local_layers_are_not_reduced(keras_ranks):
    keras_ranks.run(check_local_layers, seed())


def check_process_set():
    """The rank outside of the process set trains alone."""
    members = hvd.add_process_set([1])
    x, y = make_data(hvd.rank())
    model = make_model(hvd.DistributedOptimizer(adam(), process_set=members), **FAST)
    other = make_model(adam(), **FAST)
    fit(model, x, y, BATCH, epochs=1)
    fit(other, x, y, BATCH, epochs=1)
    assert distance(model.get_weights(), other.get_weights()) < 1e-6
    hvd.remove_process_set(members)


def test_rank_outside_of_the_set_trains_alone(keras_ranks):
    keras_ranks.run(check_process_set)


# ---- backward_passes_per_step, and steps without fit -----------------------------------------------------------------


def check_passes(average):
    """All gradients equal the rank, so the value of the variable counts the steps."""
    passes, size = 3, hvd.size()
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = sgd(1.0)
    if average:
        optimizer.build([variable])  # before backward_passes_per_step is set
    optimizer = hvd.DistributedOptimizer(
        optimizer, backward_passes_per_step=passes, average_aggregated_gradients=average
    )
    gradient = keras.ops.convert_to_tensor(np.full(2, float(hvd.rank()), "float32"))
    for number in range(1, 8):
        optimizer.apply([gradient], [variable])
        step = (size - 1) / 2 * (1 if average else passes)
        expected = -step * (number // passes)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
        assert int(optimizer.iterations) == number
    assert np.all(gradient_of(gradient) == hvd.rank()), "a tensor of the caller was overwritten"


def gradient_of(tensor):
    return keras.ops.convert_to_numpy(tensor)


def check_steps_without_fit():
    variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(sgd(1.0))
    ones = keras.ops.ones(2)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients(
            zip([ones * float(hvd.rank()), None, ones], variables, strict=True)
        )
    mean = (hvd.size() - 1) / 2
    assert [v.numpy().tolist() for v in variables] == [[-mean] * 2, [0, 0], [-1, -1]]
    optimizer.apply([ones, ones, ones])  # a built optimizer needs no variables
    assert variables[1].numpy().tolist() == [-1, -1]
    with pytest.raises(ValueError, match="Received a list of 1 gradients"):
        optimizer.apply([ones])
    again = optimizer.from_config(optimizer.get_config())
    assert type(again).__name__ == "SGD"
    assert isinstance(optimizer, keras.optimizers.SGD)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    for wrong, text in (
        (keras.optimizers.SGD, "the class SGD; pass"),
        (None, "None"),
        (keras.Sequential(), "Sequential"),
    ):
        with pytest.raises(ValueError, match=f"takes a Keras optimizer, got {text}") as caught:
            hvd.DistributedOptimizer(wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="groups"):
        hvd.DistributedOptimizer(sgd(), groups=0)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="only one of them"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=3)


def check_passes_and_steps():
    check_passes(False)
    check_passes(True)
    check_steps_without_fit()


def test_backward_passes_and_steps_without_fit(keras_ranks):
    keras_ranks.run(check_passes_and_steps)


# ---- saved models ---------------------------------------------------------------------------------------------------


class Mine(keras.optimizers.Adam):
    """A custom optimizer."""


def check_saved(folder, key):
    x, y = make_data(key)
    options = {"backward_passes_per_step": 2}
    # After an odd number of batches, so that accumulated gradients must be saved, too.
    for number, (kind, wrap) in enumerate([(adam, {}), (lambda: Mine(0.01), {}), (sgd, options)]):
        path = f"{folder}/{number}.keras"
        model = make_model(hvd.DistributedOptimizer(kind(), **wrap), **FAST)
        fit_mine(model, x[: 3 * BATCH], y[: 3 * BATCH], epochs=1)
        if wrap:  # the accumulated gradients differ between ranks
            path = f"{folder}/{number}.{hvd.rank()}.keras"
            model.save(path)
        elif hvd.rank() == 0:
            model.save(path)
        broadcast_object(None)
        expected = fit_mine(model, x, y).history["loss"]
        loaded = hvd.load_model(path, custom_optimizers=[Mine], **wrap)
        loaded.run_eagerly = FAST["run_eagerly"]
        assert fit_mine(loaded, x, y).history["loss"] == expected
        assert distance(model.get_weights(), loaded.get_weights()) == 0
        assert_same_bits(loaded)
        plain = keras.models.load_model(path, custom_objects={"Mine": Mine})
        assert type(plain.optimizer) is loaded.optimizer.__class__
        with zipfile.ZipFile(path) as file:
            assert b"horoplug" not in file.read("config.json")


@pytest.mark.short("tensorflow")
def test_saved_models_continue_training(keras_ranks, tmp_path):
    keras_ranks.run(check_saved, str(tmp_path), seed())


def check_weights_only(folder):
    """Weights can be saved and loaded into another model of the same structure."""
    x, y = make_data(3)
    path = f"{folder}/{hvd.rank()}.weights.h5"
    model = make_model(hvd.DistributedOptimizer(adam()), **FAST)
    fit_mine(model, x, y, epochs=1)
    model.save_weights(path)
    other = make_model(hvd.DistributedOptimizer(adam()), key=2)
    other.load_weights(path)
    assert distance(model.get_weights(), other.get_weights()) == 0


def test_saved_weights(keras_ranks, tmp_path):
    keras_ranks.run(check_weights_only, str(tmp_path))
