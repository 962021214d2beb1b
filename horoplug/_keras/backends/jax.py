"""Keras' JAX backend: gradients are reduced as a part of the program that ``fit`` compiles."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.sparse import JAXSparse

from horoplug._keras.options import Options, group_places
from horoplug.common.errors import HorovodInternalError
from horoplug.common.reduce_ops import Min
from horoplug.jax.compression import Compression as Compression
from horoplug.jax.mpi_ops import allgather as allgather
from horoplug.jax.mpi_ops import allreduce as allreduce
from horoplug.jax.mpi_ops import broadcast as broadcast
from horoplug.jax.mpi_ops import reducescatter as reducescatter


def native(variable: Any) -> Any:
    """The variable itself: its array is another one after each step."""
    return variable


def if_step(is_step: Any, reduce: Callable[[Any], Any], gradients: list[Any]) -> Any:
    """``reduce(gradients)`` where this is a step; Keras throws the result away where it is none."""
    if isinstance(is_step, jax.core.Tracer):
        return jax.lax.cond(is_step, reduce, lambda same: same, gradients)
    return reduce(gradients) if is_step else gradients


class BackendReduction:
    """See :class:`horoplug._keras.options.Reduction`."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        options = self._options
        reduced = list(gradients)
        if options.process_set.included() is False:
            return reduced
        reduced = [g.todense() if isinstance(g, JAXSparse) else g for g in reduced]
        places = [place for place, gradient in enumerate(reduced) if gradient is not None]
        groups = group_places(places, options.groups, variables)
        for group in [places] if groups is None else groups:
            results = allreduce(
                [reduced[place] for place in group],
                # By place: variables of the same model may have other names on other ranks.
                name=f"{name}.{len(reduced)}.{group[0]}",
                compression=options.compression,
                op=options.op,
                prescale_factor=1.0 / options.gradient_predivide_factor,
                postscale_factor=options.gradient_predivide_factor,
                process_set=options.process_set,
            )
            for place, result in zip(group, results, strict=True):
                reduced[place] = result
        return reduced

    def local(self, gradient: Any) -> Any:
        size = self._options.process_set.size()
        if gradient is None or not self._options.scale_local_gradients or not size:
            return gradient
        return gradient / size


def all_true(value: Any, **options: Any) -> Any:
    """Whether a boolean is true on all ranks."""
    return allreduce(value.astype("uint8"), op=Min, **options) > 0


def failure(error: BaseException) -> bool:
    """Whether an exception says that the job is broken (and not that the program is)."""
    return isinstance(error, HorovodInternalError) or (
        isinstance(error, jax.errors.JaxRuntimeError)
        and "a Horovod operation has failed" in str(error)
    )
