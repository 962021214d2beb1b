"""Sums of sparse COO tensors: every rank gathers the indices and the values of all ranks. Equal indices add up."""

from collections.abc import Sequence

import torch

from horoplug.torch.plain import as_bytes, plain


def split(tensor: torch.Tensor, reduction: str) -> tuple[list[torch.Tensor], str]:
    """The indices and the values of a sparse tensor, with a row for each of its elements; and the layout, which the
    ranks have to agree on: see ``Engine.submit``. ``reduction``: the name of the reduction.

    The rows are bytes, so that one operation gathers both."""
    own = tensor.coalesce()
    layout = (
        f"sparse {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} with sparse_dim {tensor.sparse_dim()} "
        f"({reduction})"
    )
    return [_bytes(own.indices().t().contiguous()), _bytes(plain(own.values()))], layout


def join(
    parts: Sequence[torch.Tensor], like: torch.Tensor, divisor: int | None = None, factor: float = 1
) -> torch.Tensor:
    """The sparse tensor of the gathered parts. It is not coalesced. ``like``: a tensor that was split. The values are
    divided by ``divisor`` and multiplied by ``factor``."""
    count = len(parts[0])
    indices = parts[0].view(-1).view(torch.int64).view(count, like.sparse_dim())
    values = parts[1].view(-1).view(like.dtype).view(count, *like.shape[like.sparse_dim() :])
    if divisor is not None:
        values = values / divisor
    if factor != 1:
        values = values * factor
    return torch.sparse_coo_tensor(indices.t(), values, like.shape, check_invariants=False)


def zeros(like: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """A sparse tensor of zeros with the shape, dtype and device of a dense tensor."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return as_bytes(rows).view(len(rows), rows.shape[1:].numel() * rows.element_size())
