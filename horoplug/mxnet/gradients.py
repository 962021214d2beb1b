"""Averages gradients in place, all at once."""

from collections.abc import Sequence
from typing import Any

from horoplug.common.calls import allreduce
from horoplug.common.compression import is_cast_by_core, wire_dtype
from horoplug.common.grouping import split_indices
from horoplug.common.ops import submit
from horoplug.common.opspec import BY_NAME
from horoplug.common.reduce_ops import Average
from horoplug.common.reduction_options import ReductionOptions
from horoplug.mxnet.adapter import ADAPTER

_ALLREDUCE = BY_NAME["allreduce"]


def average(options: ReductionOptions, names: Sequence[str], gradients: Sequence[Any]) -> None:
    """Replace gradients by their averages over the ranks of the set. Waits for each gradient to be computed, for the
    last one first, as backward() computes them; the others are computed while that one is on its way.

    Errors: as those of allreduce."""
    if not options.process_set.included() or options.process_set.size() == 1:
        return
    indices = range(len(gradients))[::-1]
    groups = [[index] for index in indices]
    if isinstance(options.groups, int):
        groups = split_indices(indices, options.groups, ())
    started: list[tuple[Any, list[tuple[int, Any, Any]]]] = []
    failure: Exception | None = None
    for group in groups:
        sent = [(index, *_packed(options.compression, gradients[index])) for index in group]
        name = names[group[0]] if len(group) == 1 else f"{names[group[-1]]}:{names[group[0]]}"
        call = allreduce(
            name=name,
            op=Average,
            prescale_factor=options.prescale,
            postscale_factor=options.postscale,
            process_set=options.process_set,
        )._replace(wire_dtype=wire_dtype(options.compression))
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
                gradients[index][:] = options.compression.decompress(tensor, context)
    if failure is not None:
        raise failure


def _packed(compression: Any, gradient: Any) -> tuple[Any, Any]:
    if is_cast_by_core(compression, gradient):
        return gradient, None
    return tuple(compression.compress(gradient))
