"""Callbacks, operations on values, and failures of training, with each Keras backend."""

import logging
import os
import signal

import numpy as np
import pytest

from horoplug.common.errors import HorovodInternalError
from horoplug.common.objects import allgather_object
from tests.harness.checks import keras_in_place
from tests.harness.checks.errors import errors_of_survivors
from tests.harness.checks.keras import (
    BATCH,
    ROWS,
    adam,
    assert_same_bits,
    fit_mine,
    make_data,
    make_model,
    sgd,
)
from tests.harness.support import NO_LIMITS, seed

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("horoplug.keras")

pytest_plugins = ["tests.harness.keras_jobs"]

STEPS = ROWS // BATCH


def on(**functions):
    """A callback from functions of (model, index of batch or epoch, logs)."""

    def method(function):
        return lambda self, number, logs=None: function(self.model, number, logs)

    body = {name: method(function) for name, function in functions.items()}
    return type("On", (keras.callbacks.Callback,), body)()


# ---- callbacks ------------------------------------------------------------------------------------------------------


def check_broadcast(key):
    """Ranks start with different weights and continue with those of rank 0 after the first batch."""
    rank, eager = hvd.rank(), {"run_eagerly": key % 2 == 0}
    x, y = make_data(key)
    model = make_model(hvd.DistributedOptimizer(adam()), key=rank, dropout=0.5, **eager)
    model.optimizer.learning_rate = 0.01 / (rank + 1)
    own = model.layers[0].bias
    own.assign(np.full(5, float(rank)))
    seeds = [v for v in model.variables if "seed" in v.path]
    assert seeds
    before = model.get_weights()[0]
    first = []
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[own])
    # The first callback sees the weights of this rank, the last one those of rank 0.
    see = on(on_train_batch_end=lambda model, *_: first.append(model.get_weights()[0]))
    fit_mine(model, x, y, epochs=1, callbacks=[see, broadcast, see])
    assert broadcast.broadcast_done
    same, other = allgather_object(first[1])
    np.testing.assert_array_equal(same, other)
    np.testing.assert_array_equal(first[1], allgather_object(first[0])[0])
    assert np.abs(before - first[1]).max() > 1e-3 or rank == 0
    biases = allgather_object(own.numpy())
    assert np.all(np.abs(biases[0] - biases[1]) > 0.5), "a local variable was overwritten"
    assert float(model.optimizer.learning_rate.numpy()) == np.float32(0.01)
    weights = [v.numpy().tobytes() for v in model.weights if v is not own]
    assert allgather_object(weights) == [weights] * hvd.size()
    states = allgather_object([v.numpy().tolist() for v in seeds])
    assert states[0] != states[1], "ranks have the same random state"


class Moments(keras.metrics.Metric):
    """Three sums in one array."""

    def __init__(self, name="moments"):
        super().__init__(name=name)
        self.sums = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ops = keras.ops
        y_true, y_pred = (ops.cast(y, self.dtype) for y in (y_true, y_pred))
        parts = [ops.sum(y_true), ops.sum(y_pred), ops.sum(y_true * y_pred)]
        self.sums.assign(self.sums + ops.stack(parts))

    def result(self):
        return self.sums * 1.0


def check_metrics(key):
    """Numbers and arrays are averaged. What cannot be stays as it is, which rank 0 says once."""
    x, y = make_data(key)
    model = make_model(hvd.DistributedOptimizer(sgd(0.01)), metrics=[Moments()])
    mine, averages, said = [], [], []
    confusion = np.arange(6, dtype="int64").reshape(2, 3) * (1 + hvd.rank())
    others = {"text": f"of {hvd.rank()}", "growing": np.ones(2 + hvd.rank()), "nothing": None}

    def add(model, epoch, logs):
        logs |= {"confusion": confusion, "pair": [1, hvd.rank()], **others}
        to_numpy = keras.ops.convert_to_numpy
        mine.append({n: to_numpy(v) if keras.ops.is_tensor(v) else v for n, v in logs.items()})

    handler = logging.Handler()
    handler.addFilter(lambda record: "cannot be averaged" in record.getMessage())
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("horoplug").addHandler(handler)
    average = hvd.callbacks.MetricAverageCallback()
    after = on(on_epoch_end=lambda model, epoch, logs: averages.append(dict(logs)))
    part = slice(hvd.rank() * 4, hvd.rank() * 4 + 4)
    callbacks = [on(on_epoch_end=add), average, after]
    history = fit_mine(model, x, y, callbacks=callbacks, validation_data=(x[part], y[part]))
    logging.getLogger("horoplug").removeHandler(handler)
    numbers, arrays = {"loss", "val_loss"}, {"moments", "val_moments", "confusion", "pair"}
    for epoch, logs in enumerate(averages):
        of_all = allgather_object({name: np.array(mine[epoch][name]) for name in numbers | arrays})
        assert logs.keys() == numbers | arrays | others.keys()
        for name in numbers | arrays:
            assert np.any(of_all[0][name] != of_all[1][name])
            expected = np.mean([each[name].astype("float64") for each in of_all], axis=0)
            np.testing.assert_allclose(logs[name], expected, rtol=1e-9)
            assert np.shape(logs[name]) == expected.shape
            assert np.all(history.history[name][epoch] == logs[name])
        assert isinstance(logs["loss"], float)
        assert all(logs[name] is value for name, value in others.items())
    assert len(averages) == 2
    if hvd.rank() != 0:
        assert said == []
        return
    assert [text.split(",")[0] for text in said] == [
        f"MetricAverageCallback: the metric {name!r} cannot be averaged" for name in sorted(others)
    ]
    assert "it is of shape (2,) on rank 0 and of shape (3,) on rank 1" in said[0]


def check_learning_rates(key):
    """A warm-up, then a schedule. The accumulated momentum is scaled with the rate."""
    x, y = make_data(key)
    rates, momenta = [], []

    def see(model, batch, logs):
        rates.append(float(model.optimizer.learning_rate.numpy()))

    def see_before(model, batch, logs):
        momenta.append(model.optimizer.momentums[0].numpy().copy())

    model = make_model(hvd.DistributedOptimizer(sgd(momentum=0.9)))
    model.optimizer.build(model.trainable_variables)
    callbacks = [
        on(on_train_batch_begin=see_before),
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2, end_epoch=3),
        hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 0.1**epoch, start_epoch=3, momentum_correction=False
        ),
        on(on_train_batch_begin=see_before, on_train_batch_end=see),
    ]
    history = fit_mine(model, x, y, epochs=4, callbacks=callbacks)
    size = hvd.size()
    steps = np.arange(1, 2 * STEPS + 1) / (2 * STEPS)
    expected = [*(0.1 * (1 + steps * (size - 1)) / size), *[0.05] * STEPS, *[0.1**4] * STEPS]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], rates[STEPS - 1 :: STEPS], rtol=1e-6)
    before, after = momenta[0::2], momenta[1::2]
    for step in range(1, len(rates)):
        factor = rates[step] / rates[step - 1] if step < 3 * STEPS else 1.0
        np.testing.assert_allclose(after[step], before[step] * factor, rtol=1e-4, atol=1e-9)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)


def check_checkpoint(folder):
    x, y = make_data(1)
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    model = make_model(hvd.DistributedOptimizer(sgd()))
    with pytest.raises(ValueError, match="filepath"):
        fit_mine(model, x, y, epochs=1, callbacks=[best])
    best.filepath = f"{folder}/{hvd.rank()}.keras"
    fit_mine(model, x, y, epochs=1, callbacks=[best])
    loaded = hvd.load_model(best.filepath)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def check_wrong_arguments():
    warmup, schedule = (
        hvd.callbacks.LearningRateWarmupCallback,
        hvd.callbacks.LearningRateScheduleCallback,
    )
    with pytest.raises(
        TypeError, match=r"LearningRateWarmup.*: warmup_epochs= takes a number, got 'x'"
    ):
        warmup(0.1, warmup_epochs="x")
    with pytest.raises(
        TypeError, match=r"LearningRateSchedule.*: multiplier= takes a number, got 'x'"
    ):
        schedule(0.1, "x")
    x, y = make_data(1)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(7)
    with pytest.raises(ValueError, match=r"root rank 7 does not exist; there are ranks \[0, 1\]"):
        fit_mine(make_model(sgd()), x, y, epochs=1, callbacks=[callback])


def check_callbacks(folder, key):
    check_wrong_arguments()
    check_broadcast(key)
    check_metrics(key)
    check_learning_rates(key)
    check_checkpoint(folder)


@pytest.mark.short
def test_callbacks(keras_ranks, tmp_path):
    keras_ranks.run(check_callbacks, str(tmp_path), seed())


# ---- values ---------------------------------------------------------------------------------------------------------


def check_values():
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))
    assert hvd.allreduce(rank + 1, op=hvd.Sum) == total
    assert hvd.allreduce([1.0, 3.0 * (rank + 1)]).tolist() == [1.0, 3.0 * total / size]
    array = np.full((2 * size, 3), rank + 1, "float64")
    for value in (array, keras.ops.convert_to_tensor(array, "float32"), keras.Variable(array)):
        of_backend = not isinstance(value, np.ndarray)

        def of(result, of_backend=of_backend):
            assert keras.ops.is_tensor(result) == of_backend
            return keras.ops.convert_to_numpy(result)

        assert np.all(of(hvd.allreduce(value, op=hvd.Sum, name="sum")) == total)
        assert of(hvd.allgather(value))[:: 2 * size, 0].tolist() == list(range(1, size + 1))
        assert np.all(of(hvd.broadcast(value, root_rank=1)) == 2)
        assert of(hvd.reducescatter(value, op=hvd.Sum)).tolist() == [[total] * 3] * 2
        half = of(hvd.allreduce(value, compression=hvd.Compression.fp16))
        assert np.all(half == total / size)
    model = make_model(hvd.DistributedOptimizer(adam()), key=rank)
    hvd.broadcast_global_variables(1, model)
    model.optimizer.build(model.trainable_variables)
    assert_same_bits(model)
    with pytest.raises(ValueError, match="needs the model"):
        hvd.broadcast_global_variables(0)


@pytest.mark.short("tensorflow")
def test_operations_on_values(keras_ranks):
    keras_ranks.run(check_values)


# ---- failures -------------------------------------------------------------------------------------------------------


def check_elastic(key):
    """A rank fails during training. All ranks restore the last commit and reach the result of an undisturbed run."""
    x, y = make_data(key)
    undisturbed = make_model(hvd.DistributedOptimizer(adam()))
    fit_mine(undisturbed, x, y, epochs=3)
    model = make_model(hvd.DistributedOptimizer(adam()), key=1 if hvd.rank() == 0 else 2)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0, note="a")
    failing = 1 + key % (STEPS - 2)  # not the last one
    begun = []

    def fail(model, batch, logs):
        # The other rank gets the failure during the next batch.
        if hvd.rank() == 1 and len(begun) == 1 and state.epoch == 1 and batch == failing:
            raise HorovodInternalError("on purpose")

    @hvd.elastic.run
    def train(state):
        begun.append((state.epoch, state.batch, state.note))
        state.note = "b"
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=1000),
            on(on_train_batch_end=fail),
        ]
        fit_mine(state.model, x, y, epochs=3, initial_epoch=state.epoch, callbacks=callbacks)
        return state.epoch

    assert train(state) == 3
    assert begun == [(0, 0, "a"), (1, 0, "b")]
    assert_same_bits(model)
    for value, expected in zip(model.get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)
    relative = hvd.elastic.UpdateEpochStateCallback(state)  # of fit(epochs=total - state.epoch)
    fit_mine(model, x, y, epochs=2, callbacks=[relative])
    assert state.epoch == 5


@pytest.mark.short("torch", failure=True)
def test_elastic_training_restores_the_last_commit(keras_ranks):
    keras_ranks.run(check_elastic, seed())


@pytest.mark.parametrize("check", keras_in_place.CHECKS)
def test_state_that_returns_to_no_commit(keras_ranks, check):
    keras_ranks.run(check)


def check_different_models():
    """Ranks with different models get an error from the broadcast and from the reduction."""
    x, y = make_data(1)
    model = make_model(hvd.DistributedOptimizer(sgd()))
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    with pytest.raises(HorovodInternalError, match=r"rank 0 has 10 .* rank 1 has 4"):
        hvd.broadcast_global_variables(0, model if hvd.rank() == 0 else other)
    layer = model.layers[0] if hvd.rank() == 0 else other.layers[0]
    with pytest.raises(HorovodInternalError, match=r"kernel is float32\[4, 3\] on rank 1 and"):
        hvd.broadcast_global_variables(1, layer)

    def different():
        units = 5 + hvd.rank()
        made = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)]
        )
        made.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
        return made

    def train_repeatedly(model):  # Keras does not check whether its own steps have failed
        for _ in range(1000):
            model.train_on_batch(x[:4], y[:4])

    with pytest.raises(Exception, match=r"rank [01].*shape"):
        train_repeatedly(different())
    with pytest.raises(Exception, match=r"rank [01].*shape"):
        fit_mine(different(), x, y, epochs=1)


def test_different_models_are_reported(keras_pool):
    with keras_pool.ranks(2) as job:
        job.run(check_different_models)


def check_kill(victim, eager):
    x, y = make_data(1)
    model = make_model(hvd.DistributedOptimizer(sgd()), run_eagerly=eager)

    def die(model, batch, logs):
        if batch == 2 and hvd.rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    fit_mine(model, x, y, epochs=100, callbacks=[on(on_train_batch_end=die)])


KINDS = {"tensorflow": "UnknownError", "torch": "HorovodInternalError", "jax": "JaxRuntimeError"}


@pytest.mark.short("jax", failure=True)
def test_killed_rank_is_reported(keras_pool):
    key = seed()
    with keras_pool.ranks(2, env=NO_LIMITS) as job:
        kind = KINDS[keras_pool.variables["KERAS_BACKEND"]]
        victim = key % 2
        errors_of_survivors(job.outcomes(check_kill, victim, False), victim, kind)
