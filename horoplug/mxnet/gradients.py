"""Averages gradients in place, all at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from horoplug.common.calls import allreduce
from horoplug.common.compression import is_cast_by_core, wire_dtype
from horoplug.common.grouping import split_indices
from horoplug.common.ops import submit
from horoplug.common.opspec import OPERATIONS
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.mxnet.adapter import ADAPTER
from horoplug.mxnet.compression import Compression

_ALLREDUCE = next(spec for spec in OPERATIONS if spec.name == "allreduce")


class Settings(NamedTuple):
    """How to average. ``predivide_factor``: the gradients are divided by it before the sum, and multiplied after it.
    ``groups``: the number of groups of gradients that are reduced together; 0: each by itself."""

    predivide_factor: float = 1.0
    groups: int = 0
    process_set: ProcessSet = global_process_set
    compression: Any = Compression.none

    def check(self) -> None:
        """Errors: ValueError, TypeError."""
        if not isinstance(self.groups, int) or self.groups < 0:
            raise ValueError(f"num_groups takes a number of groups, got {self.groups!r}.")
        if self.predivide_factor <= 0:
            raise ValueError("gradient_predivide_factor must be positive.")
        wire_dtype(self.compression)


def average(settings: Settings, names: Sequence[str], gradients: Sequence[Any]) -> None:
    """Replace gradients by their averages over the ranks of the set. Waits for each gradient to be computed, for the
    last one first, as backward() computes them; the others are computed while that one is on its way.

    Errors: as those of allreduce."""
    if not settings.process_set.included() or settings.process_set.size() == 1:
        return
    indices = range(len(gradients))[::-1]
    groups = [[index] for index in indices]
    if settings.groups:
        groups = split_indices(indices, settings.groups, ())
    started: list[tuple[Any, list[tuple[int, Any, Any]]]] = []
    failure: Exception | None = None
    for group in groups:
        sent = [(index, *_packed(settings.compression, gradients[index])) for index in group]
        name = names[group[0]] if len(group) == 1 else f"{names[group[-1]]}:{names[group[0]]}"
        call = allreduce(
            name=name,
            op=Average,
            prescale_factor=1.0 / settings.predivide_factor,
            postscale_factor=settings.predivide_factor,
            process_set=settings.process_set,
        )._replace(wire_dtype=wire_dtype(settings.compression))
        tensors = [tensor for _, tensor, _ in sent]
        operation = submit(ADAPTER, _ALLREDUCE, tensors, call, len(group) > 1, True)
        started.append((operation, sent))
    for operation, sent in started:
        try:
            operation.wait()
        except Exception as error:
            failure = failure or error
            continue
        for index, tensor, context in sent:
            if tensor is not gradients[index]:
                gradients[index][:] = settings.compression.decompress(tensor, context)
    if failure is not None:
        raise failure


def _packed(compression: Any, gradient: Any) -> tuple[Any, Any]:
    if is_cast_by_core(compression, gradient):
        return gradient, None
    return tuple(compression.compress(gradient))
