"""Callbacks for ``model.fit`` of ``tf.keras``; see :mod:`horoplug.keras.callbacks`."""

from typing import TYPE_CHECKING

import tensorflow as tf

from horoplug.keras import callbacks as _callbacks

if TYPE_CHECKING or issubclass(
    _callbacks.MetricAverageCallback, tf.keras.callbacks.Callback
):  # tf.keras is the package keras
    from horoplug.keras.callbacks import *  # noqa: F403
else:
    globals().update(_callbacks.derived_from(tf.keras))

__all__ = _callbacks.__all__
