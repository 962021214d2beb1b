"""Training with ``tf.keras`` that continues after a failure; see :mod:`horoplug.keras.elastic`."""

from typing import TYPE_CHECKING

import tensorflow as tf

from horoplug.keras import elastic as _elastic
from horoplug.keras.elastic import KerasState as KerasState
from horoplug.keras.elastic import run as run

if TYPE_CHECKING or issubclass(_elastic.CommitStateCallback, tf.keras.callbacks.Callback):
    from horoplug.keras.elastic import *  # noqa: F403
else:
    globals().update(_elastic.derived_from(tf.keras))

__all__ = _elastic.__all__
