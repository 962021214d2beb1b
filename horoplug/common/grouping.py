"""The argument ``groups=`` of optimizers and tapes: gradients that are reduced together."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Groups = int | Sequence[Sequence[Any]] | None


def check_groups(groups: Groups, members: str = "variables") -> None:
    """Raises ValueError unless ``groups`` is None, a positive number, or a list of lists. ``members``: the elements of
    these lists, for the message."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups > 0):
        return
    if isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups):
        return
    raise ValueError(f"groups takes a positive number or a list of lists of {members}.")


def groups_of(arguments: Mapping[str, Any]) -> Groups:
    """The value of ``groups``, or of its deprecated name ``num_groups``, in the arguments of a call."""
    groups: Groups = arguments.get("groups")
    return groups if groups is not None else (arguments.get("num_groups") or None)


def split_places(
    places: Sequence[int],
    groups: int | Sequence[Sequence[Hashable]],
    keys: Sequence[Hashable],
) -> list[list[int]]:
    """The places of gradients in groups: so many of neighbours, or those that are listed by their keys (``keys`` has
    one for each place there is) and every other one by itself."""
    if isinstance(groups, int):
        count = min(groups, len(places))
        bounds = [len(places) * number // count for number in range(count + 1)] if count else []
        return [list(places[a:b]) for a, b in itertools.pairwise(bounds)]
    number = {key: n for n, group in enumerate(groups) for key in group}
    made: dict[Any, list[int]] = {}
    for place in places:
        made.setdefault(number.get(keys[place], ("alone", place)), []).append(place)
    return list(made.values())
