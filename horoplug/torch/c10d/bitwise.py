"""Bitwise reductions, which the core does not have: every rank gathers all tensors and combines them.

They are for flags and masks, not for large tensors: a rank needs memory for the tensors of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from horoplug.torch.c10d.reductions import Combine, GathersRows
from horoplug.torch.plain import as_bytes, plain


def allreduce(
    group: GathersRows, tensors: Sequence[torch.Tensor], combine: Combine, opts: Any
) -> Any:
    return reduce(group, tensors, combine, group.rank(), opts)


def reduce(
    group: GathersRows, tensors: Sequence[torch.Tensor], combine: Combine, root: int, opts: Any
) -> Any:
    return _combine(group, [(tensor, tensor) for tensor in tensors], combine, root, opts)


def reduce_scatter(
    group: GathersRows,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    combine: Combine,
    opts: Any,
) -> Any:
    return _combine(group, pairs, combine, group.rank(), opts)


def _combine(
    group: GathersRows,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    combine: Combine,
    root: int,
    opts: Any,
) -> Any:
    """``pairs``: what a rank gives, and the tensor that gets the result, or this rank's part of it."""
    for tensor, _ in pairs:
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(
                f"bitwise reductions take tensors of integers or bool, got {tensor.dtype}"
            )
    size, rank = group.size(), group.rank()

    def then(gathered: list[torch.Tensor]) -> None:
        if rank != root:
            return
        for rows, (tensor, output) in zip(gathered, pairs, strict=True):
            result: Any = functools.reduce(combine, rows.unbind()).view(tensor.dtype)
            if output.numel() != tensor.numel():
                result = result.view(size, -1)[rank]
            output.copy_(result.view(output.shape))

    # As bytes, so that tensors of any dtypes are one operation.
    flat = [as_bytes(plain(tensor.detach()))[None] for tensor, _ in pairs]
    kinds = ", ".join(f"{tensor.numel()} elements of {tensor.dtype}" for tensor, _ in pairs)
    layout = f"{combine.__name__} of {kinds.replace('torch.', '')}"
    return group.gather_rows(flat, [output for _, output in pairs], then, layout, opts)
