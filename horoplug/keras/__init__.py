"""Horoplug for Keras, on its TensorFlow, PyTorch and JAX backends: ``import horoplug.keras as hvd``. The functions,
their arguments and defaults are Horovod's.

hvd.init()
optimizer = keras.optimizers.Adam(0.001 * hvd.size())
model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(my_part_of_the_data, callbacks=callbacks, verbose=hvd.rank() == 0)
"""

from collections.abc import Iterable, Mapping
from typing import Any

try:
    import keras as _keras
except ImportError as error:
    raise ImportError(
        "horoplug.keras needs Keras and one of its backends: pip install keras tensorflow (or torch, or jax)."
    ) from error

from horoplug._keras.backends import load as _load_backend
from horoplug._keras.models import load_model as _load_model
from horoplug._keras.operations import *  # noqa: F403
from horoplug._keras.optimizer import Optimizer
from horoplug._keras.optimizer import make as _make
from horoplug.common.api import *  # noqa: F403
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.keras import callbacks as callbacks
from horoplug.keras import elastic as elastic

Compression = _load_backend(_keras.backend.backend()).Compression


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Optimizer:
    """Have an optimizer of Keras use the gradients of all ranks. Returns the optimizer itself: its variables, learning
    rate and schedules stay, and it is saved as what it was before.

    Gradients are reduced before Keras does anything with them: clipping, weight decay, moving averages.

    name: what the operations' names begin with; the same on all ranks.
    device_dense, device_sparse: where TensorFlow places the operations.
    compression: how gradients travel: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of your own.
    sparse_as_dense: make sparse gradients dense to reduce them, instead of gathering them.
    gradient_predivide_factor: with Average, divide by this before summing and by size / this after it.
    op: how gradients are combined: Average, Sum, Adasum, Min, Max, Product.
    groups: gradients that travel together: the number of groups, or lists of variables. (num_groups: its old name.)
    process_set: the ranks to reduce over; other ranks use their own gradients.
    scale_local_gradients: divide the gradients of variables that are not reduced (``optimizer.register_local_var``) by
        the number of ranks, as the average does.
    backward_passes_per_step: reduce and apply gradients with every so-manieth batch only, until then add them up. Keras
        does so (its gradient_accumulation_steps, which the optimizer is saved with).
    average_aggregated_gradients: divide these sums by backward_passes_per_step.

    Raises ValueError for what is no optimizer, an optimizer that is distributed already, and arguments that make no
    sense."""
    return _make(optimizer, locals())


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """:func:`DistributedOptimizer` that leaves the trainable variables of ``local_layers`` (a layer or a list of them,
    built) to each rank alone."""
    return _make(optimizer, locals())


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """``keras.models.load_model``, with the model's optimizer made a :func:`DistributedOptimizer`; training goes on
    where it was. A model that was saved without horoplug does as well.

    ``custom_optimizers``: classes of optimizers that are not Keras' own; ``custom_objects``: see Keras; ``options``:
    other arguments of :func:`DistributedOptimizer`. ``legacy_opts`` is accepted for Horovod's sake."""
    options["compression"] = compression
    return _load_model(
        _keras, DistributedOptimizer, filepath, custom_optimizers, custom_objects, options
    )
