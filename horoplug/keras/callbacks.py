"""Callbacks for ``model.fit``, for every Keras backend."""

from typing import Any

import keras

from horoplug._keras import callbacks as mixins

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(mixins.Broadcast, keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcast the model's weights and the optimizer's variables from rank ``root_rank`` after the first batch.

    All ranks continue with the same weights, even if they started from different ones or only one rank has loaded a
    checkpoint. The states of random generators (dropout) remain different. ``local_variables``: variables that are not
    broadcast. ``device`` is accepted for compatibility with Horovod and has no effect. If the models differ, all ranks
    raise a HorovodInternalError that names the difference.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        history = model.fit(x, y, callbacks=[callback], verbose=0)
        kernels = keras.ops.convert_to_numpy(hvd.allgather(model.layers[0].kernel))
        kernels[0] == kernels[1]  # -> [True]
    """


class MetricAverageCallback(mixins.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics over the ranks at the end of each epoch. ``device`` is accepted for compatibility with
    Horovod and has no effect.

    It must precede callbacks that use metrics (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint, TensorBoard);
    otherwise their decisions differ between ranks. All ranks must have the same metrics, so either all ranks or none
    have validation data.

    Example, on two ranks:

        logs = {"loss": 1.0 + hvd.rank()}
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        logs  # -> {"loss": 1.5}
    """


class LearningRateScheduleCallback(mixins.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` for ``start_epoch <= epoch < end_epoch``.

    ``multiplier``: a function of the epoch, or a number. ``staircase``: adjust the rate once per epoch. Otherwise it is
    adjusted for each batch, with a fractional epoch, and ``steps_per_epoch`` is needed if Keras cannot determine it.
    ``momentum_correction``: multiply the accumulated momentum by the new rate over the old one. The logs of an epoch
    contain the rate as ``lr``.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        callback = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 0.5**epoch)
        history = model.fit(x, y, epochs=3, callbacks=[callback], verbose=0)
        history.history["lr"]  # -> [0.5, 0.25, 0.125]
    """


class LearningRateWarmupCallback(mixins.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` during the first ``warmup_epochs`` epochs, a
    little with each batch (Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2). ``initial_lr`` is the rate
    of a single process times the number of ranks.

    ``verbose``: 1 prints a message when the rate is reached. The other arguments are those of
    :class:`LearningRateScheduleCallback`.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.5, warmup_epochs=2)
        history = model.fit(x, y, batch_size=2, epochs=3, callbacks=[callback], verbose=0)
        history.history["lr"]  # -> [0.375, 0.5, 0.5]
    """


class BestModelCheckpoint(mixins.BestModel, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``keras.callbacks.ModelCheckpoint`` that saves the best model. The attribute ``filepath`` must be set before
    ``fit``.

    ``monitor``, ``verbose``, ``mode``, ``save_freq`` and ``save_weights_only`` are arguments of the Keras callback.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        callback.filepath = f"best-{hvd.rank()}.keras"
        history = model.fit(x, y, callbacks=[callback], verbose=0)
        type(keras.models.load_model(callback.filepath)).__name__  # -> "Sequential"
    """


def derived_from(library: Any) -> dict[str, type]:
    """The same callbacks for another library with Keras' interface (``tf_keras``)."""
    return mixins.derive([globals()[name] for name in __all__], library)
