"""Training that goes on after a failure.

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
    ]
    state.model.fit(data, initial_epoch=state.epoch, epochs=10, callbacks=callbacks)

train(hvd.elastic.KerasState(model, epoch=0))

For now with the processes that the job was started with: see :mod:`horoplug.common.elastic`.
"""

from collections.abc import Callable
from typing import Any

import keras

from horoplug._keras import backends
from horoplug._keras import elastic as bodies
from horoplug._keras.callbacks import derive
from horoplug._keras.elastic import KerasState as KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is its state (a :class:`KerasState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails because the job is broken, all ranks go back to the last ``state.commit()``, start anew,
    take over the state of rank 0, and the function is called again. It should begin where the state says."""
    return bodies.run(func, backends.load(keras.backend.backend()).failure)


class CommitStateCallback(bodies.Commit, keras.callbacks.Callback):
    """Commit the state after every so many batches, and at the end of each epoch. Put it after callbacks that update
    the state."""


class UpdateBatchStateCallback(bodies.UpdateBatch, keras.callbacks.Callback):
    """Keep the number of the last batch in ``state.batch``; 0 at the end of an epoch."""


class UpdateEpochStateCallback(bodies.UpdateEpoch, keras.callbacks.Callback):
    """Keep the number of epochs that are done in ``state.epoch``."""


def derived_from(library: Any) -> dict[str, type]:
    """The same callbacks for another library with Keras' interface (``tf_keras``)."""
    kinds = [CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback]
    return derive(kinds, library)
