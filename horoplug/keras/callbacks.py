"""Callbacks for ``model.fit``. They work on each of Keras' backends."""

from typing import Any

import keras

from horoplug._keras import callbacks as bodies

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(bodies.Broadcast, keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's variables of rank ``root_rank``, when the first batch is done.

    With it, ranks that start from different weights, or of which only one has loaded a checkpoint, go on alike. The
    states of random numbers (dropout) remain each rank's own. ``local_variables``: what to leave out. ``device`` is
    accepted for Horovod's sake. Ranks with different models get a HorovodInternalError that names the difference."""


class MetricAverageCallback(bodies.MetricAverage, keras.callbacks.Callback):
    """Average the metrics over the ranks at the end of each epoch.

    Put it before callbacks that use metrics (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint, TensorBoard), or their
    decisions differ between ranks. All ranks must have the same metrics: validation data on all or none."""


class LearningRateScheduleCallback(bodies.LearningRateSchedule, keras.callbacks.Callback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` until before ``end_epoch``.

    ``multiplier``: a function of the epoch, or a number. ``staircase``: adjust it once per epoch; otherwise with each
    batch, where the epoch has a fraction and ``steps_per_epoch`` is needed if Keras does not know it.
    ``momentum_correction``: scale the momentum that an optimizer with one has gathered by new over old rate. The
    logs of an epoch have the rate as ``lr``."""


class LearningRateWarmupCallback(bodies.LearningRateWarmup, keras.callbacks.Callback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr``, batch by batch, in the first
    ``warmup_epochs`` (Goyal et al., 2017): ``initial_lr`` is that of one process times the number of ranks.

    ``verbose``: 1 says when the rate is reached. For the rest see :class:`LearningRateScheduleCallback`."""


class BestModelCheckpoint(bodies.BestModel, keras.callbacks.ModelCheckpoint):
    """``keras.callbacks.ModelCheckpoint`` that keeps the best model. Set the attribute ``filepath`` before ``fit``."""


def derived_from(library: Any) -> dict[str, type]:
    """The same callbacks for another library with Keras' interface (``tf_keras``)."""
    return bodies.derive([globals()[name] for name in __all__], library)
