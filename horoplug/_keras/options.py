"""What ``DistributedOptimizer`` was told about gradients, whatever the framework that reduces them."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average, resolve

Groups = int | Sequence[Sequence[Any]] | None


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
        groups = self.groups
        if groups is None or (isinstance(groups, int) and not isinstance(groups, bool)):
            if groups is not None and groups <= 0:
                raise ValueError(f"groups={groups}: the number of groups must be positive.")
        elif not isinstance(groups, (list, tuple)) or not all(
            isinstance(group, (list, tuple)) for group in groups
        ):
            raise ValueError("groups takes a positive number or a list of lists of variables.")


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
    there = list(places)
    if groups is None:
        return None
    if isinstance(groups, int):
        count = min(groups, len(there))
        bounds = [len(there) * number // count for number in range(count + 1)] if count else [0]
        return [there[a:b] for a, b in itertools.pairwise(bounds)]
    number = {id(variable): n for n, group in enumerate(groups) for variable in group}
    made: dict[Any, list[int]] = {}
    for place in there:
        made.setdefault(number.get(id(variables[place]), ("alone", place)), []).append(place)
    return list(made.values())
