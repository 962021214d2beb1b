"""Reduction of a pytree of gradients over the ranks, for optimizers and ``distributed_value_and_grad``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from horoplug.common.compression import check_compressor
from horoplug.common.grouping import Groups, check_groups, split_indices
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average
from horoplug.jax.mpi_ops import allreduce, refuse_sparse


def _check_groups(groups: Groups) -> None:
    members = "the leaves' paths as jax.tree_util.keystr writes them"
    check_groups(groups, members)
    if not isinstance(groups, int) and not all(isinstance(p, str) for g in groups or () for p in g):
        raise ValueError(f"groups takes a positive number or a list of lists of {members}.")


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. The arguments are those of :func:`horoplug.jax.DistributedOptimizer`.

    Raises ValueError for a predivide factor with another op than Average, and for invalid ``groups``."""

    name: str  # prefix of the operations' names, the same on every rank
    compression: Any
    op: int
    gradient_predivide_factor: float
    groups: Groups
    process_set: ProcessSet

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only.")
        check_compressor(self.compression)
        _check_groups(self.groups)

    def reduce(self, gradients: Any) -> Any:
        """The reduced gradients. On ranks outside of the process set, the gradients are returned unchanged."""
        if self.process_set.included() is False:
            return gradients
        refuse_sparse(self.name, gradients)
        paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in paths]
        groups = self._split([jax.tree_util.keystr(path) for path, _ in paths])
        return jax.tree_util.tree_unflatten(
            structure, self.reduce_groups(leaves, groups, self.name)
        )

    def reduce_groups(
        self, leaves: Sequence[Any], groups: Sequence[Sequence[int]], name: str
    ) -> list[Any]:
        """The arrays with those at the indices of ``groups`` reduced, each group as one operation."""
        reduced = list(leaves)
        for group in groups:
            results = allreduce(
                [leaves[i] for i in group],
                # By index: the names of parameters may differ between ranks.
                name=f"{name}.{len(leaves)}.{group[0]}",
                compression=self.compression,
                op=self.op,
                prescale_factor=1.0 / self.gradient_predivide_factor,
                postscale_factor=self.gradient_predivide_factor,
                process_set=self.process_set,
            )
            for i, result in zip(group, results, strict=True):
                reduced[i] = result
        return reduced

    def _split(self, paths: list[str]) -> list[list[int]]:
        """The indices of the gradients of each group."""
        indices = list(range(len(paths)))
        if self.groups is None:
            return [indices] if indices else []
        if not isinstance(self.groups, int):
            listed = {path for group in self.groups for path in group}
            if unknown := sorted(listed - set(paths)):
                raise ValueError(
                    f"groups names {unknown[0]}, but the gradients are {', '.join(paths)}."
                )
        return split_indices(indices, self.groups, paths)
