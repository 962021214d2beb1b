"""The reductions of ``torch.distributed`` in terms of the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from horoplug.common import reduce_ops

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Reduction(NamedTuple):
    """One reduction."""

    op: int = reduce_ops.Sum
    prescale: float = 1.0
    bitwise: Combine | None = None
    """The function that combines two tensors, for reductions that the core does not have."""

    @property
    def scatters(self) -> bool:
        """Whether the core's reducescatter has this reduction."""
        return self.op in (reduce_ops.Sum, reduce_ops.Average)

    def check_bool(self) -> None:
        """Raises ValueError if tensors of bool cannot be reduced so."""
        if self.op not in (reduce_ops.Min, reduce_ops.Max, reduce_ops.Product):
            raise ValueError(
                "tensors of bool have no sum and no average; use ReduceOp.MAX (or) or ReduceOp.MIN (and)"
            )


SUM = Reduction()

_RedOp: Any = dist.ReduceOp.RedOpType
_TABLE = {
    int(_RedOp.SUM): SUM,
    int(_RedOp.AVG): Reduction(reduce_ops.Average),
    int(_RedOp.PRODUCT): Reduction(reduce_ops.Product),
    int(_RedOp.MIN): Reduction(reduce_ops.Min),
    int(_RedOp.MAX): Reduction(reduce_ops.Max),
    int(_RedOp.BAND): Reduction(bitwise=torch.bitwise_and),
    int(_RedOp.BOR): Reduction(bitwise=torch.bitwise_or),
    int(_RedOp.BXOR): Reduction(bitwise=torch.bitwise_xor),
}

_OF_CORE = (_RedOp.SUM, _RedOp.AVG, _RedOp.PRODUCT, _RedOp.MIN, _RedOp.MAX)


def of_core_by_hash() -> dict[int, int]:
    """The reductions of the core by the hash of the ``ReduceOp`` that means them. PyTorch's hash of a ReduceOp is the
    number of its kind; comparing two takes ten times as long. Empty if it is something else."""
    if any(hash(dist.ReduceOp(kind)) != int(kind) for kind in _OF_CORE):
        return {}
    return {int(kind): _TABLE[int(kind)].op for kind in _OF_CORE}


def reduction_of(op: Any) -> Reduction:
    """The reduction of a ``ReduceOp`` or ``RedOpType``. Raises ValueError for one that horoplug does not know."""
    kind = int(getattr(op, "op", op))
    if kind == int(_RedOp.PREMUL_SUM):
        return Reduction(prescale=float(_factor(op)))
    found = _TABLE.get(kind)
    if found is None:
        raise ValueError(f"the backend horoplug does not support {op}")
    return found


def _factor(op: Any) -> Any:
    """The factor of a PREMUL_SUM: a number or a tensor of one element."""
    factor = getattr(op, "factor", None)
    return op.__getstate__()[1] if factor is None else factor  # before PyTorch 2.13


class GathersRows(Protocol):
    """What the reductions that the core does not have need from a process group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def gather_rows(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        then: Callable[[list[torch.Tensor]], None],
        layout: str,
        opts: Any,
    ) -> Any: ...
