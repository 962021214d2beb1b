"""Horoplug for Keras with the TensorFlow, PyTorch and JAX backends: ``import horoplug.keras as hvd``. The functions,
their arguments and their defaults are Horovod's.

hvd.init()
optimizer = keras.optimizers.Adam(0.001 * hvd.size())
model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(my_part_of_the_data, callbacks=callbacks, verbose=hvd.rank() == 0)
"""

try:
    import keras as _keras  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horoplug.keras needs Keras and one of its backends: pip install keras tensorflow (or torch, or jax)"
    ) from error

from horoplug._keras.operations import *  # noqa: F403
from horoplug.base.surface import declare as _declare
from horoplug.common.api import *  # noqa: F403
from horoplug.keras import callbacks as callbacks
from horoplug.keras import elastic as elastic
from horoplug.keras.optimizer import Compression as Compression
from horoplug.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from horoplug.keras.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer
from horoplug.keras.optimizer import load_model as load_model

_declare(globals(), "callbacks", "elastic")
