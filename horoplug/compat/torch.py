"""The autograd functions of ``horovod.torch.mpi_ops``, which programs call as ``HorovodAllreduce.apply(...)``."""

from typing import Any, cast

import torch

from horoplug.common.process_sets import ProcessSet
from horoplug.torch import mpi_ops


class HorovodAllreduce:
    """Differentiable allreduce."""

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """See :func:`horoplug.torch.allreduce`; likewise for the following classes."""
        return mpi_ops.allreduce(
            tensor,
            average=average,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )


class HorovodGroupedAllreduce:
    """Differentiable allreduce of a group of tensors."""

    @staticmethod
    def apply(
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        reduced = mpi_ops.grouped_allreduce(
            tensors,
            average=average,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return tuple(reduced)


class HorovodAllgather:
    """Differentiable allgather."""

    @staticmethod
    def apply(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        return mpi_ops.allgather(tensor, name, process_set)


class HorovodGroupedAllgather:
    """Differentiable allgather of a group of tensors."""

    @staticmethod
    def apply(
        name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(mpi_ops.grouped_allgather(tensors, name, process_set))


class HorovodBroadcast:
    """Differentiable broadcast."""

    @staticmethod
    def apply(
        tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        return mpi_ops.broadcast(tensor, root_rank, name, process_set)


class HorovodAlltoall:
    """Differentiable alltoall. Returns the received rows, and how many have come from each rank."""

    @staticmethod
    def apply(
        tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if splits is None:
            ranks = process_set.size() or 1
            splits = torch.full((ranks,), tensor.shape[0] // ranks, dtype=torch.int32)
        result: Any = mpi_ops.alltoall(tensor, splits, name, process_set)
        return cast(tuple[torch.Tensor, torch.Tensor], result)


class HorovodReducescatter:
    """Differentiable reducescatter."""

    @staticmethod
    def apply(
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        return mpi_ops.reducescatter(
            tensor,
            name=name,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )


class HorovodGroupedReducescatter:
    """Differentiable reducescatter of a group of tensors."""

    @staticmethod
    def apply(
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        reduced = mpi_ops.grouped_reducescatter(
            tensors,
            name=name,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return tuple(reduced)
