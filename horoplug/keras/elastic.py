"""Training that continues after a failure.

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
    ]
    state.model.fit(data, initial_epoch=state.epoch, epochs=10, callbacks=callbacks)

train(hvd.elastic.KerasState(model, epoch=0))

In a job of ``horovodrun --min-np``, processes that fail are replaced: see :mod:`horoplug.common.elastic`.
"""

from collections.abc import Callable
from typing import Any

import keras

from horoplug._keras import backends
from horoplug._keras import elastic as mixins
from horoplug._keras.callbacks import derive
from horoplug._keras.elastic import KerasState as KerasState
from horoplug.common.elastic import Parameters, Result
from horoplug.common.keras_seeds import keep_seeds

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


keep_seeds(keras)


def run(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a training function (``func``) whose first argument is its state (a :class:`KerasState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails because the job is broken, all ranks restore the last ``state.commit()``, initialise again,
    receive the state of rank 0, and call the function again. The function must resume from the progress in the state.
    Other errors are raised to the caller, and so is the tenth failure in a row without a commit.

    Returns a function with the same arguments and result, which raises ValueError if the state cannot be sent.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))

        @hvd.elastic.run
        def train(state, epochs):
            callbacks = [
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ]
            state.model.fit(x, y, initial_epoch=state.epoch, epochs=epochs, callbacks=callbacks, verbose=0)
            return state.epoch

        train(hvd.elastic.KerasState(model, epoch=0), 2)  # -> 2
    """
    return mixins.run(func, backends.load(keras.backend.backend()).failure)


class CommitStateCallback(mixins.Commit, keras.callbacks.Callback):  # type: ignore[misc]
    """Commit the state after every ``batches_per_commit`` batches and at the end of each epoch. It must follow the
    callbacks that update the state.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        state = hvd.elastic.KerasState(model, epoch=0, batch=5, marker="")
        callback = hvd.elastic.CommitStateCallback(state, batches_per_commit=1)
        state.marker = "committed"
        history = model.fit(x, y, callbacks=[callback], verbose=0)
        state.marker = "not committed"
        state.restore()
        state.marker  # -> "committed"
    """


class UpdateBatchStateCallback(mixins.UpdateBatch, keras.callbacks.Callback):  # type: ignore[misc]
    """Store the index of the last batch in ``state.batch`` (``state``: a :class:`KerasState`), and 0 at the end of an
    epoch.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        state = hvd.elastic.KerasState(model, epoch=0, batch=5, marker="")
        callback = hvd.elastic.UpdateBatchStateCallback(state)
        history = model.fit(x, y, callbacks=[callback], verbose=0)
        state.batch  # -> 0
    """


class UpdateEpochStateCallback(mixins.UpdateEpoch, keras.callbacks.Callback):  # type: ignore[misc]
    """Store the number of completed epochs in ``state.epoch``. ``state``: a :class:`KerasState`.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        state = hvd.elastic.KerasState(model, epoch=0, batch=5, marker="")
        callback = hvd.elastic.UpdateEpochStateCallback(state)
        history = model.fit(x, y, epochs=2, callbacks=[callback], verbose=0)
        state.epoch  # -> 2
    """


def derived_from(library: Any) -> dict[str, type]:
    """The same callbacks for another library with Keras' interface (``tf_keras``)."""
    callbacks = [CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback]
    return derive(callbacks, library)
