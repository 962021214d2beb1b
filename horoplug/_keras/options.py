"""What a backend of Keras reduces."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from horoplug.common.grouping import Groups, split_indices


class KerasReduction(Protocol):
    """The part of a distributed optimizer that depends on the backend. Each backend constructs its implementation from
    :class:`horoplug.common.reduction_options.ReductionOptions`."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        """The reduced gradients of ``variables``, in their order. Gradients that are None remain None. On ranks outside
        of the process set, the gradients are returned unchanged. ``name``: prefix of the operations' names."""

    def local(self, gradient: Any) -> Any:
        """See :meth:`horoplug.common.reduction_options.ReductionOptions.local`."""


def group_indices(
    indices: Iterable[int], groups: Groups, variables: Sequence[Any]
) -> list[list[int]] | None:
    """The indices of the gradients that each operation reduces; None without ``groups``: the backend decides.

    ``variables``: the variables of all gradients; ``groups`` contains the same objects."""
    if groups is None:
        return None
    listed = groups if isinstance(groups, int) else [[id(v) for v in group] for group in groups]
    return split_indices(list(indices), listed, [id(variable) for variable in variables])
