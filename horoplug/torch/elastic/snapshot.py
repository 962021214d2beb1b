"""Copies of an object's state that are made again and again, such as at each commit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


class Snapshot:
    """A copy of an object's state: a nested structure of dictionaries, lists, tuples, tensors and other objects.

    The copies of tensors keep their memory from one :meth:`save` to the next, so that a save runs at the speed of
    memory and needs no new pages. All that is not a plain tensor is copied as by ``copy.deepcopy``."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._copies: list[torch.Tensor] = []

    def save(self, state: Any) -> None:
        """Replace the copy by one of ``state``. If this raises, the copy is that of before or a complete new one."""
        sources: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        # By identity; deepcopy takes these instead of copying tensors.
        replacements: dict[int, Any] = {}
        for same in _groups(_tensors(state)):
            kept = self._copies[len(copies)] if len(copies) < len(self._copies) else None
            if kept is None or not _alike(kept, same[0]):
                kept = torch.empty_like(same[0], memory_format=torch.preserve_format)
            sources.append(same[0])
            copies.append(kept)
            replacements |= {id(each): kept for each in same}
        structure = copy.deepcopy(state, replacements)
        try:
            self._replace(structure, copies, sources)
        except BaseException:  # from the handler of a signal, for example
            self._replace(structure, copies, sources)
            raise

    def value(self) -> Any:
        """A copy of the state, which the caller may keep and change."""
        return copy.deepcopy(self._structure)

    def _replace(
        self, structure: Any, copies: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> None:
        with torch.no_grad():
            for kept, source in zip(copies, sources, strict=True):
                kept.copy_(source)
        self._structure, self._copies = structure, copies


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """The plain tensors in dictionaries, lists and tuples, at any depth."""
    if isinstance(state, torch.Tensor):
        if _is_plain(state):
            yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)
    )


def _groups(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Lists of tensors that are the same view of the same memory, such as tied weights. Not those that share memory in
    another way: copies of them must do so, too."""
    by_memory: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        by_memory.setdefault((tensor.device, memory) if memory else id(tensor), []).append(tensor)
    for group in by_memory.values():
        if len({_view(each) for each in group}) == 1:
            yield group


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()


def _alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        kept.shape == tensor.shape and kept.dtype == tensor.dtype and kept.device == tensor.device
    )
