"""Reduction of a pytree of gradients over the ranks, for optimizers and ``distributed_value_and_grad``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from horoplug.common.grouping import split_indices
from horoplug.common.reduction_options import ReductionOptions
from horoplug.jax.mpi_ops import allreduce, refuse_sparse


class Options(ReductionOptions):
    """The options of a reduction of pytrees."""

    members = "the leaves' paths as jax.tree_util.keystr writes them"
    member_type = str


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced."""

    options: ReductionOptions

    def reduce(self, gradients: Any) -> Any:
        """The reduced gradients. On ranks outside of the process set, the gradients are returned unchanged."""
        if self.options.process_set.included() is False:
            return gradients
        refuse_sparse(self.options.name, gradients)
        paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
        leaves = [leaf for _, leaf in paths]
        groups = self._split([jax.tree_util.keystr(path) for path, _ in paths])
        return jax.tree_util.tree_unflatten(
            structure, self.reduce_groups(leaves, groups, self.options.name)
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
                compression=self.options.compression,
                op=self.options.op,
                prescale_factor=self.options.prescale,
                postscale_factor=self.options.postscale,
                process_set=self.options.process_set,
            )
            for i, result in zip(group, results, strict=True):
                reduced[i] = result
        return reduced

    def _split(self, paths: list[str]) -> list[list[int]]:
        """The indices of the gradients of each group."""
        indices = list(range(len(paths)))
        groups = self.options.groups
        if groups is None:
            return [indices] if indices else []
        if not isinstance(groups, int):
            listed = {path for group in groups for path in group}
            if unknown := sorted(listed - set(paths)):
                raise ValueError(
                    f"groups names {unknown[0]}, but the gradients are {', '.join(paths)}"
                )
        return split_indices(indices, groups, paths)
