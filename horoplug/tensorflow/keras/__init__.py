"""Horoplug for ``tf.keras``: ``import horoplug.tensorflow.keras as hvd``. The functions, their arguments and their
defaults are Horovod's. It is :mod:`horoplug.keras` and also supports Keras 2 (``tf_keras``, TF_USE_LEGACY_KERAS=1).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as _tf

from horoplug._keras.models import load_model as _load_model
from horoplug._keras.operations import *  # noqa: F403
from horoplug._keras.optimizer import Optimizer
from horoplug._keras.optimizer import make as _make
from horoplug.common.api import *  # noqa: F403
from horoplug.common.compression import AnyCompressor
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet as ProcessSet
from horoplug.common.process_sets import global_process_set as global_process_set
from horoplug.common.reduce_ops import Average as Average
from horoplug.keras import Compression as Compression
from horoplug.keras import PartialDistributedOptimizer as PartialDistributedOptimizer
from horoplug.tensorflow.keras import callbacks as callbacks
from horoplug.tensorflow.keras import elastic as elastic


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
    return _make(optimizer, locals())


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
    return _load_model(
        _tf.keras, DistributedOptimizer, filepath, custom_optimizers, custom_objects, options
    )
