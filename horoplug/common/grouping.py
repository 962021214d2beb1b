"""The argument ``groups=`` of optimizers and tapes: gradients that are reduced together."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

Groups = int | Sequence[Sequence[Any]] | None


def split_indices(
    indices: Sequence[int], groups: int | Sequence[Sequence[Hashable]], keys: Sequence[Hashable]
) -> list[list[int]]:
    """Divide the indices of gradients into groups.

    ``groups``: the number of groups, each of about equally many consecutive indices; or lists of keys, where a gradient
    whose key is in no list forms a group of its own. ``keys``: the key of each gradient, by the gradient's index; not
    used if ``groups`` is a number."""
    if isinstance(groups, int):
        count = min(groups, len(indices))
        bounds = [len(indices) * number // count for number in range(count + 1)] if count else []
        return [list(indices[a:b]) for a, b in itertools.pairwise(bounds)]
    number = {key: n for n, group in enumerate(groups) for key in group}
    made: dict[Any, list[int]] = {}
    for index in indices:
        made.setdefault(number.get(keys[index], ("alone", index)), []).append(index)
    return list(made.values())
