"""Horoplug for TensorFlow: ``import horoplug.tensorflow as hvd``. The functions, their arguments and their
defaults are Horovod's.

hvd.init()
with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
    loss = compute_loss(model, batch)
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)  # once, after the first step
"""

import typing as _typing

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horoplug.tensorflow needs TensorFlow: pip install tensorflow (or tensorflow-cpu)"
    ) from error

from horoplug.base.surface import declare as _declare
from horoplug.common.api import *  # noqa: F403
from horoplug.tensorflow import elastic as elastic
from horoplug.tensorflow.compression import Compression as Compression
from horoplug.tensorflow.functions import *  # noqa: F403
from horoplug.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper as LocalGradientAggregationHelper,
)
from horoplug.tensorflow.gradient_tape import DistributedGradientTape as DistributedGradientTape
from horoplug.tensorflow.gradient_tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from horoplug.tensorflow.mpi_ops import *  # noqa: F403
from horoplug.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from horoplug.tensorflow.util import _cache as _cache
from horoplug.tensorflow.util import _executing_eagerly as _executing_eagerly
from horoplug.tensorflow.util import _make_allreduce_grads_fn as _make_allreduce_grads_fn
from horoplug.tensorflow.util import (
    _make_cached_allreduce_grads_fn as _make_cached_allreduce_grads_fn,
)
from horoplug.tensorflow.util import _make_subgraph as _make_subgraph
from horoplug.tensorflow.util import check_num_rank_power_of_2 as check_num_rank_power_of_2
from horoplug.tensorflow.util import gpu_available as gpu_available
from horoplug.tensorflow.util import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from horoplug.tensorflow.util import refs_to_vars as refs_to_vars
from horoplug.tensorflow.util import vars_to_refs as vars_to_refs

if _typing.TYPE_CHECKING:
    from horoplug.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
else:

    def __getattr__(name: str) -> _typing.Any:
        if name == "SyncBatchNormalization":  # imports Keras, an optional dependency
            from horoplug.tensorflow.sync_batch_norm import SyncBatchNormalization

            return SyncBatchNormalization
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_declare(globals(), "elastic")
