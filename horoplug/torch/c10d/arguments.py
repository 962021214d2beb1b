"""Checks of the arguments of collective operations. ``size`` is the number of ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def check_list(size: int, name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    """Raises ValueError unless there is one tensor for each of ``size`` ranks, all with the size and dtype of
    ``like``."""
    if len(tensors) != size:
        raise ValueError(
            f"{name} takes a list of one tensor for each of the {size} ranks, got {len(tensors)}"
        )
    for index, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name}: tensor {index} of the list is {tensor.dtype} of shape {list(tensor.shape)}, but the "
                f"other tensor is {like.dtype} of shape {list(like.shape)}; they must have the same size"
            )


def check_whole(size: int, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Raises ValueError unless ``whole`` has as many elements as ``size`` tensors like ``part``."""
    if whole.dtype != part.dtype:
        raise ValueError(f"{name}: the tensors have different dtypes: {whole.dtype}, {part.dtype}")
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"{name}: the larger tensor must have {size} times (the size of the group) the elements of the "
            f"other one, but they have shapes {list(whole.shape)} and {list(part.shape)}"
        )


def row_splits(size: int, which: str, tensor: torch.Tensor, splits: Any) -> list[int]:
    """How many rows of ``tensor`` belong to each of ``size`` ranks; without ``splits``, equal numbers. Raises
    ValueError if they do not add up."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single without {which}_split_sizes divides the first dimension of the {which} evenly, "
                f"but {rows} rows are not divisible by {size} ranks"
            )
        return [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"all_to_all_single: {which}_split_sizes takes one number for each of the {size} ranks, which "
            f"add up to the first dimension, {rows}; got {list(splits)}"
        )
    return list(splits)
