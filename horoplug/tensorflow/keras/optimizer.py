"""``DistributedOptimizer`` for ``tf.keras``, and models that are saved with it."""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from horoplug._keras.models import load_model as load_with
from horoplug._keras.optimizer import Optimizer, make
from horoplug.common.compression import AnyCompressor
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.common.reduction_options import ReductionOptions
from horoplug.keras import Compression


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """:func:`horoplug.keras.DistributedOptimizer`, with Horovod's order of arguments in this module."""
    options = ReductionOptions(
        name=name or "",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    return make(optimizer, options)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: AnyCompressor = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """:func:`horoplug.keras.load_model` for ``tf.keras``."""
    options["compression"] = compression
    return load_with(
        tf.keras, DistributedOptimizer, filepath, custom_optimizers, custom_objects, options
    )
