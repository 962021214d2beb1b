"""What ``DistributedOptimizer`` was told about gradients, whatever the framework that reduces them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from horoplug.common.grouping import Groups, check_groups, groups_of, split_places
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average, resolve


@dataclass(frozen=True)
class Options:
    """The arguments of ``DistributedOptimizer`` of the same names.

    Raises ValueError for an op that is none, a predivide factor with another op than Average, and ``groups`` that are
    none."""

    name: str  # of the optimizer, the same on every rank
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
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "Options":
        """From the arguments of a user's call, by name; those that are none of the options are left out."""
        known = {field.name: arguments[field.name] for field in fields(cls)}
        return cls(**known | {"name": name, "groups": groups_of(arguments)})


class Reduction(Protocol):
    """How a backend reduces gradients; made from :class:`Options`."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], name: str) -> list[Any]:
        """The reduced gradients, each of the variable in the same place; what is None stays so. On ranks outside of the
        process set: the gradients as they are. ``name``: what the operations' names begin with."""

    def local(self, gradient: Any) -> Any:
        """The gradient of a variable that every rank has for itself: divided by the number of ranks if
        ``scale_local_gradients`` says so."""


def group_places(
    places: Iterable[int], groups: Groups, variables: Sequence[Any]
) -> list[list[int]] | None:
    """The places of gradients that travel together; None: the caller may choose.

    ``variables``: those of all places; ``groups`` has the very same objects."""
    if groups is None:
        return None
    listed = groups if isinstance(groups, int) else [[id(v) for v in group] for group in groups]
    return split_places(list(places), listed, [id(variable) for variable in variables])
