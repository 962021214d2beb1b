"""The sum of sparse tensors over the ranks."""

from __future__ import annotations

from typing import Any

import torch

from horoplug.common import reduce_ops
from horoplug.torch import sparse
from horoplug.torch.c10d.reductions import GathersRows, Reduction


def allreduce(group: GathersRows, tensor: torch.Tensor, reduction: Reduction, opts: Any) -> Any:
    """Every rank gathers the indices and values of all ranks; entries with equal indices add up.

    Raises ValueError for reductions other than sum and average."""
    if reduction.op not in (reduce_ops.Sum, reduce_ops.Average) or reduction.bitwise is not None:
        raise ValueError("sparse tensors can only be reduced with ReduceOp.SUM or ReduceOp.AVG")
    averages = reduction.op == reduce_ops.Average
    kind = f"{'average' if averages else 'sum'}, factor {reduction.prescale:g}"
    parts, layout = sparse.split(tensor, kind)

    def then(gathered: list[torch.Tensor]) -> None:
        divisor = group.size() if averages else None
        tensor.copy_(sparse.join(gathered, tensor, divisor, reduction.prescale).coalesce())

    return group.gather_rows(parts, [tensor], then, layout, opts)
