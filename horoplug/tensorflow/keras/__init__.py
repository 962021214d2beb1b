"""Horoplug for ``tf.keras``: ``import horoplug.tensorflow.keras as hvd``. The functions, their arguments and their
defaults are Horovod's. It is :mod:`horoplug.keras` and also supports Keras 2 (``tf_keras``, TF_USE_LEGACY_KERAS=1).
"""

from horoplug._keras.operations import *  # noqa: F403
from horoplug.base.surface import declare as _declare
from horoplug.common.api import *  # noqa: F403
from horoplug.keras import Compression as Compression
from horoplug.keras import PartialDistributedOptimizer as PartialDistributedOptimizer
from horoplug.tensorflow.keras import callbacks as callbacks
from horoplug.tensorflow.keras import elastic as elastic
from horoplug.tensorflow.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from horoplug.tensorflow.keras.optimizer import load_model as load_model

_declare(globals(), "callbacks", "elastic")
