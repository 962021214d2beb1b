"""The autograd functions of ``horovod.torch.mpi_ops``, which programs call as ``HorovodAllreduce.apply(...)``."""

from collections.abc import Callable
from typing import Any, Final

import torch

from horoplug.common.process_sets import ProcessSet
from horoplug.torch import mpi_ops


def _autograd_function(operation: Callable[..., Any], order: str) -> type:
    """A class whose method ``apply`` takes a tensor and the arguments in this order; for a grouped operation, the
    arguments and then the tensors."""
    names, is_grouped = order.split(), operation.__name__.startswith("grouped_")

    def apply(*args: Any) -> Any:
        if not is_grouped:
            return operation(args[0], **dict(zip(names, args[1:], strict=True)))
        options, tensors = args[: len(names)], args[len(names) :]
        return tuple(operation(tensors, **dict(zip(names, options, strict=True))))

    text = f"Differentiable {operation.__name__}; see :func:`horoplug.torch.{operation.__name__}`."
    name = f"Horovod{operation.__name__.title().replace('_', '')}"
    return type(name, (), {"__doc__": text, "apply": staticmethod(apply)})


_ALLREDUCE: Final = "average name op prescale_factor postscale_factor process_set"
_REDUCESCATTER: Final = "name op process_set prescale_factor postscale_factor"

HorovodAllreduce = _autograd_function(mpi_ops.allreduce, _ALLREDUCE)
HorovodGroupedAllreduce = _autograd_function(mpi_ops.grouped_allreduce, _ALLREDUCE)
HorovodAllgather = _autograd_function(mpi_ops.allgather, "name process_set")
HorovodGroupedAllgather = _autograd_function(mpi_ops.grouped_allgather, "name process_set")
HorovodBroadcast = _autograd_function(mpi_ops.broadcast, "root_rank name process_set")
HorovodReducescatter = _autograd_function(mpi_ops.reducescatter, _REDUCESCATTER)
HorovodGroupedReducescatter = _autograd_function(mpi_ops.grouped_reducescatter, _REDUCESCATTER)


class HorovodAlltoall:
    """Differentiable alltoall. Returns the received rows, and how many have come from each rank."""

    @staticmethod
    def apply(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        if splits is None:
            ranks = process_set.size() or 1
            splits = torch.full((ranks,), tensor.shape[0] // ranks, dtype=torch.int32)
        return mpi_ops.alltoall(tensor, splits, name, process_set)
