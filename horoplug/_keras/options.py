"""The options of ``DistributedOptimizer``, independent of the backend that reduces the gradients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from horoplug.common.grouping import Groups, check_groups, groups_of, split_indices
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average, resolve


@dataclass(frozen=True)
class ReductionOptions:
    """The arguments of ``DistributedOptimizer`` of the same names.

    Raises ValueError for an invalid op, for a predivide factor with another op than Average, and for invalid
    ``groups``."""

    name: str  # name of the optimizer, the same on every rank
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    op: int
    gradient_predivide_factor: float
    groups: Groups
    process_set: ProcessSet
    scale_local_gradients: bool

    def __post_init__(self) -> None:
        if resolve(self.op) != Average and self.gradient_predivide_factor != 1.0:
            raise ValueError("gradient_predivide_factor is for op=Average only.")
        check_groups(self.groups)

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "ReductionOptions":
        """Make options from the arguments of a user's call, by name. Other arguments than the fields of this class are
        ignored."""
        known = {field.name: arguments[field.name] for field in fields(cls)}
        return cls(**known | {"name": name, "groups": groups_of(arguments)})


class KerasReduction(Protocol):
    """The part of a distributed optimizer that depends on the backend. Each backend constructs its implementation from
    :class:`ReductionOptions`."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        """The reduced gradients of ``variables``, in their order. Gradients that are None remain None. On ranks outside
        of the process set, the gradients are returned unchanged. ``name``: prefix of the operations' names."""

    def local(self, gradient: Any) -> Any:
        """The gradient of a local variable, divided by the number of ranks if ``scale_local_gradients`` is set."""


def group_indices(
    indices: Iterable[int], groups: Groups, variables: Sequence[Any]
) -> list[list[int]] | None:
    """The indices of the gradients that each operation reduces; None without ``groups``: the backend decides.

    ``variables``: the variables of all gradients; ``groups`` contains the same objects."""
    if groups is None:
        return None
    listed = groups if isinstance(groups, int) else [[id(v) for v in group] for group in groups]
    return split_indices(list(indices), listed, [id(variable) for variable in variables])
