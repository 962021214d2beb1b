"""Gradients of all ranks become one: what optimizers and ``distributed_value_and_grad`` do with a pytree of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average
from horoplug.jax.mpi_ops import allreduce

Groups = int | Sequence[Sequence[str]] | None


def _check_groups(groups: Groups) -> None:
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if isinstance(groups, (list, tuple)) and all(
        isinstance(group, (list, tuple)) and all(isinstance(path, str) for path in group)
        for group in groups
    ):
        return
    raise ValueError(
        "groups takes a positive number, or lists of the leaves' paths as jax.tree_util.keystr writes them."
    )


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. The arguments are those of :func:`horoplug.jax.DistributedOptimizer`.

    Raises ValueError for a predivide factor with another op than Average, and for ``groups`` that are none."""

    name: str  # what the operations' names begin with, the same on every rank
    compression: Any
    op: int
    gradient_predivide_factor: float
    groups: Groups
    process_set: ProcessSet

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only.")
        _check_groups(self.groups)

    def reduce(self, gradients: Any) -> Any:
        """The reduced gradients. On ranks outside of the process set: the gradients as they are."""
        if self.process_set.included() is False:
            return gradients
        paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in paths]
        # By place: a model's parameters may have other names on other ranks.
        for group in self._split([jax.tree_util.keystr(path) for path, _ in paths]):
            reduced = allreduce(
                [leaves[place] for place in group],
                name=f"{self.name}.{len(leaves)}.{group[0]}",
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / self.gradient_predivide_factor,
                postscale_factor=self.gradient_predivide_factor,
                process_set=self.process_set,
            )
            for place, gradient in zip(group, reduced, strict=True):
                leaves[place] = gradient
        return jax.tree_util.tree_unflatten(structure, leaves)

    def _split(self, paths: list[str]) -> list[list[int]]:
        """The places of gradients that travel together."""
        if self.groups is None:
            groups = [list(range(len(paths)))]
        elif isinstance(self.groups, int):
            count = max(min(self.groups, len(paths)), 1)
            ends = [len(paths) * i // count for i in range(count + 1)]
            groups = [list(range(start, end)) for start, end in pairwise(ends)]
        else:
            number = {path: n for n, group in enumerate(self.groups) for path in group}
            if unknown := sorted(number.keys() - set(paths)):
                raise ValueError(
                    f"groups names {unknown[0]}, but the gradients are {', '.join(paths)}."
                )
            by_number: dict[Any, list[int]] = {}
            for place, path in enumerate(paths):
                by_number.setdefault(number.get(path, ("alone", place)), []).append(place)
            groups = list(by_number.values())
        return [group for group in groups if group]
