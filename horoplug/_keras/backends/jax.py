"""The JAX backend: gradients are reduced as part of the program that ``fit`` compiles."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.sparse import JAXSparse

from horoplug._keras.options import group_indices
from horoplug.base.errors import HorovodInternalError
from horoplug.common.reduce_ops import Min
from horoplug.common.reduction_options import ReductionOptions
from horoplug.jax.compression import Compression as Compression
from horoplug.jax.elastic import is_failure
from horoplug.jax.mpi_ops import allgather as allgather
from horoplug.jax.mpi_ops import allreduce as allreduce
from horoplug.jax.mpi_ops import broadcast as broadcast
from horoplug.jax.mpi_ops import reducescatter as reducescatter
from horoplug.jax.reduction import Reduction


def native(variable: Any) -> Any:
    """The variable itself, because its array is replaced in each step."""
    return variable


def if_step(is_step: Any, reduce: Callable[[Any], Any], gradients: list[Any]) -> Any:
    """``reduce(gradients)`` if this is a step. Otherwise Keras discards the result."""
    if isinstance(is_step, jax.core.Tracer):
        return jax.lax.cond(is_step, reduce, lambda same: same, gradients)
    return reduce(gradients) if is_step else gradients


class BackendReduction:
    """See :class:`horoplug._keras.options.KerasReduction`."""

    def __init__(self, options: ReductionOptions) -> None:
        self._options = options
        self._reduction = Reduction(options)
        self.local = options.local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        options = self._options
        if options.process_set.included() is False:
            return list(gradients)
        dense = [g.todense() if isinstance(g, JAXSparse) else g for g in gradients]
        indices = [i for i, gradient in enumerate(dense) if gradient is not None]
        groups = group_indices(indices, options.groups, variables)
        if groups is None:
            groups = [indices] if indices else []
        return self._reduction.reduce_groups(dense, groups, name)


def all_true(value: Any, **options: Any) -> Any:
    """Whether a boolean is true on all ranks."""
    return allreduce(value.astype("uint8"), op=Min, **options) > 0


def failure(error: BaseException) -> bool:
    """Whether an exception is a failure of the job, not of the program."""
    return isinstance(error, HorovodInternalError) or is_failure(error)


class Progress:
    """Raises ValueError: a step that fails leaves no parameters, because ``fit`` donates them to the compiled step."""

    def __init__(self, optimizer: Any) -> None:
        raise ValueError(
            "rollback=False is not possible with Keras' JAX backend: fit donates the parameters to the compiled step, "
            "so that a step that fails leaves none; use rollback=True"
        )
