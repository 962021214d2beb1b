"""The TensorFlow backend: gradients are reduced by operations of the graph that ``fit`` traces."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug._keras.options import ReductionOptions
from horoplug.common.reduce_ops import Min
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
        fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        if isinstance(options.groups, (list, tuple)):
            fields["groups"] = [[native(v) for v in group] for group in options.groups]
        self._reduction = Reduction(**fields, ignore_name_scope=True)  # Keras numbers name scopes

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        if name != self._reduction.name:
            self._reduction = dataclasses.replace(self._reduction, name=name)
        return self._reduction.reduce(gradients, [native(variable) for variable in variables])

    def local(self, gradient: Any) -> Any:
        return self._reduction.local(gradient)


def all_true(value: Any, **options: Any) -> Any:
    """Whether a boolean is true on all ranks."""
    return allreduce(tf.cast(value, tf.uint8), op=Min, ignore_name_scope=True, **options) > 0


def failure(error: BaseException) -> bool:
    """Whether an exception is a failure of the job, not of the program."""
    return is_failure(error)
