"""The TensorFlow backend: gradients are reduced by operations of the graph that ``fit`` traces."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.reduce_ops import Min
from horoplug.common.reduction_options import ReductionOptions
from horoplug.tensorflow.compression import Compression as Compression
from horoplug.tensorflow.elastic import is_failure
from horoplug.tensorflow.mpi_ops import allgather as allgather
from horoplug.tensorflow.mpi_ops import allreduce as allreduce
from horoplug.tensorflow.mpi_ops import broadcast as broadcast
from horoplug.tensorflow.mpi_ops import reducescatter as reducescatter
from horoplug.tensorflow.progress import TensorFlowProgress as Progress  # noqa: F401
from horoplug.tensorflow.reduction import Reduction


def native(variable: Any) -> Any:
    """The ``tf.Variable`` of a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def can_compile() -> bool:
    """Whether gradients can be reduced in functions that XLA compiles, which is not possible on GPUs."""
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def if_step(is_step: Any, reduce: Callable[[Any], Any], gradients: list[Any]) -> Any:
    """``reduce(gradients)``: this backend calls it only at steps."""
    return reduce(gradients)


class BackendReduction:
    """See :class:`horoplug._keras.options.KerasReduction`."""

    def __init__(self, options: ReductionOptions) -> None:
        if isinstance(options.groups, list):
            groups = [[native(variable) for variable in group] for group in options.groups]
            options = dataclasses.replace(options, groups=groups)
        self._reduction = Reduction(options, ignore_name_scope=True)  # Keras numbers name scopes
        self.local = self._reduction.local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        return self._reduction.reduce(gradients, [native(each) for each in variables], name)


def all_true(value: Any, **options: Any) -> Any:
    """Whether a boolean is true on all ranks."""
    return allreduce(tf.cast(value, tf.uint8), op=Min, ignore_name_scope=True, **options) > 0


def failure(error: BaseException) -> bool:
    """Whether an exception is a failure of the job, not of the program."""
    return is_failure(error)
