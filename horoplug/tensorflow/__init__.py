"""Horoplug for TensorFlow: ``import horoplug.tensorflow as hvd``. The functions, their arguments and defaults are
Horovod's.

hvd.init()
with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
    loss = compute_loss(model, batch)
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)  # once, after the first step
"""

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horoplug.tensorflow needs TensorFlow: pip install tensorflow (or tensorflow-cpu)."
    ) from error

from horoplug.common.api import *  # noqa: F403
from horoplug.tensorflow.compression import Compression as Compression
from horoplug.tensorflow.functions import *  # noqa: F403
from horoplug.tensorflow.gradient_tape import DistributedGradientTape as DistributedGradientTape
from horoplug.tensorflow.gradient_tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from horoplug.tensorflow.mpi_ops import *  # noqa: F403
