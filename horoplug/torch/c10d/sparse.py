"""The sum of sparse tensors over the ranks."""

from __future__ import annotations

from typing import Any

import torch

from horoplug.common import reduce_ops
from horoplug.torch.c10d.reductions import GathersRows, Reduction


def allreduce(group: GathersRows, tensor: torch.Tensor, reduction: Reduction) -> Any:
    """Every rank gathers the indices and values of all ranks; entries with equal indices add up.

    Raises ValueError for reductions other than sum and average."""
    if reduction.op not in (reduce_ops.Sum, reduce_ops.Average) or reduction.bitwise is not None:
        raise ValueError("sparse tensors can only be reduced with ReduceOp.SUM or ReduceOp.AVG.")
    own = tensor.coalesce()

    def then(gathered: list[torch.Tensor]) -> None:
        indices, values = gathered
        if reduction.op == reduce_ops.Average:
            values = values / group.size()
        total = torch.sparse_coo_tensor(
            indices.t(), values * reduction.prescale, tensor.size(), check_invariants=False
        )
        tensor.copy_(total.coalesce())

    return group.gather_rows([own.indices().t().contiguous(), own.values()], [tensor], then)
