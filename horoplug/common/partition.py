"""Splitting a group of tensors into the parts that the core runs: the tensors of one operation have one dtype and are
on one device."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Part(Generic[Key]):
    """Some tensors of a group."""

    key: Key
    positions: list[int]
    """The positions of its tensors in the group, ascending."""
    name: str | None
    """The name by which the ranks pair their calls; None if the user gave the group no name."""

    def select(self, values: Sequence[Any]) -> list[Any]:
        """The values of this part's tensors, from one value for each tensor of the group."""
        return [values[position] for position in self.positions]


def split_group(
    name: str | None, keys: Sequence[Key], label: Callable[[Key], str]
) -> list[Part[Key]]:
    """Split a group by keys, such as dtypes, one for each tensor. The parts are in the order in which their keys first
    appear.

    Ranks pair the parts by name: ``label`` gives each key a suffix that is the same on all ranks. A group that needs
    no splitting keeps its name."""
    positions: dict[Key, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    is_split = len(positions) > 1
    return [
        Part(key, members, f"{name}.{label(key)}" if name and is_split else name)
        for key, members in positions.items()
    ]


def join_parts(parts: Sequence[Part[Any]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of all tensors in the order of the group. ``results``: those of each part."""
    joined: dict[int, Any] = {}
    for part, of_part in zip(parts, results, strict=True):
        joined.update(zip(part.positions, of_part, strict=True))
    return [joined[position] for position in range(len(joined))]
