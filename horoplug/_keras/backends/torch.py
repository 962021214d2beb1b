"""The PyTorch backend: the gradients that ``backward`` has stored in ``.grad`` are reduced in place."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from horoplug._keras.options import group_indices
from horoplug.base.errors import HorovodInternalError
from horoplug.common.keras_updates import KerasProgress
from horoplug.common.reduce_ops import Min
from horoplug.common.reduction_options import ReductionOptions
from horoplug.torch.compression import Compression as Compression
from horoplug.torch.elastic.progress import check_reductions
from horoplug.torch.grouping import Group
from horoplug.torch.mpi_ops import allgather as allgather
from horoplug.torch.mpi_ops import allreduce as allreduce
from horoplug.torch.mpi_ops import broadcast as broadcast
from horoplug.torch.mpi_ops import reducescatter as reducescatter
from horoplug.torch.reduction import Reducer


def native(variable: Any) -> Any:
    """The ``torch.nn.Parameter`` of a Keras variable."""
    return variable if isinstance(variable, torch.Tensor) else variable.value


class _GradientHolder:
    """Stands for a parameter whose gradient is reduced: has the attribute ``grad``. Needed because the gradient that
    Keras passes need not be the ``.grad`` of a parameter."""

    grad: torch.Tensor | None = None


def if_step(is_step: Any, reduce: Callable[[Any], Any], gradients: list[Any]) -> Any:
    """``reduce(gradients)``: this backend calls it only at steps."""
    return reduce(gradients)


class BackendReduction:
    """See :class:`horoplug._keras.options.KerasReduction`."""

    def __init__(self, options: ReductionOptions) -> None:
        self._options = options
        groups = options.groups
        if isinstance(groups, (list, tuple)):
            groups = [[native(variable) for variable in group] for group in groups]
        self._groups = groups
        self._names: dict[Any, str] = {}
        self._holders: dict[str, Any] = {}
        self._reducer = Reducer(self._names, options)
        self.local = options.local

    @torch._disable_dynamo  # type: ignore[attr-defined,unused-ignore]
    @torch.no_grad()
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        if self._options.process_set.included() is False:
            return list(gradients)
        parameters = [native(variable) for variable in variables]
        holders = {
            number: self._holder(f"{name}.{len(gradients)}.{number}", gradient, parameter)
            for number, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True))
            if gradient is not None
        }
        groups = group_indices(holders, self._groups, parameters)
        try:
            if groups is None:
                self._reducer.submit(holders.values(), {})
            else:
                self._submit_groups([holders[number] for number in group] for group in groups)
            self._reducer.finish()
            return [holders[n].grad if n in holders else None for n in range(len(gradients))]
        finally:
            self._reducer.forget()
            for holder in holders.values():
                holder.grad = None

    def _holder(self, name: str, gradient: Any, parameter: Any) -> Any:
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = _GradientHolder()
            self._names[holder] = name
        # A tensor of the caller is not overwritten.
        holder.grad = gradient if gradient is parameter.grad else gradient.detach().clone()
        return holder

    def _submit_groups(self, groups: Iterable[Sequence[Any]]) -> None:
        for group in groups:
            if len(group) == 1:
                self._reducer.submit(group, {})
            elif group:
                self._reducer.submit_group(Group(group), {})


def all_true(value: Any, **options: Any) -> Any:
    """Whether a boolean is true on all ranks."""
    return allreduce(value.to(torch.uint8), op=Min, **options) > 0


def failure(error: BaseException) -> bool:
    """Whether an exception is a failure of the job, not of the program."""
    return isinstance(error, HorovodInternalError)


class Progress(KerasProgress):
    """Counts the updates of an optimizer."""

    @contextlib.contextmanager
    def _counted(self, gradients: Sequence[Any]) -> Iterator[None]:
        check_reductions(gradients)
        with super()._counted(gradients):
            yield
