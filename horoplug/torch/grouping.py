"""Names of an optimizer's parameters, and which of them travel together."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horoplug.common.objects import broadcast_object
from horoplug.common.process_sets import ProcessSet


class Group(tuple[torch.Tensor, ...]):
    """Parameters whose gradients are reduced together. Equal only to itself, so that it is cheap as a key."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def name_parameters(
    param_groups: Sequence[Mapping[str, Any]],
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """The name of every parameter in the groups (those of ``named_parameters`` that are in none, too).

    Raises ValueError if ``named_parameters`` is no sequence of pairs, has a name twice, or leaves out a parameter."""
    if named_parameters is None:
        return {
            p: f"allreduce.noname.{number}.{place}"
            for number, group in enumerate(param_groups)
            for place, p in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ValueError(
            "named_parameters takes pairs (name, parameter), such as model.named_parameters() gives."
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}.")
    names = {parameter: name for name, parameter in named}
    nameless = [
        f"number {place} of group {number}, shape {tuple(p.shape)}"
        for number, group in enumerate(param_groups)
        for place, p in enumerate(group["params"])
        if p not in names
    ]
    if nameless:
        raise ValueError(
            f"named_parameters leaves out parameters of the optimizer: {'; '.join(nameless)}."
        )
    return names


def check_groups(groups: int | Sequence[Sequence[torch.Tensor]]) -> None:
    """Raises ValueError unless ``groups`` is a positive number, or lists of tensors in which none is twice."""
    if isinstance(groups, int):
        if isinstance(groups, bool) or groups <= 0:
            raise ValueError(f"groups={groups}: the number of groups must be positive.")
        return
    if not isinstance(groups, (list, tuple)):
        raise ValueError("groups takes a positive number or a list of lists of parameters.")
    seen = set()
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(
                f"groups takes lists of parameters; one has a {type(parameter).__name__}."
            )
        if parameter in seen:
            raise ValueError("groups has a parameter more than once.")
        seen.add(parameter)


def make_groups(
    names: Mapping[torch.Tensor, str],
    groups: int | Sequence[Sequence[torch.Tensor]],
    process_set: ProcessSet,
) -> list[Group]:
    """Divide the parameters of ``names`` into groups: so many of about one size, or as listed and every other parameter
    by itself.

    Collective: the order of the parameters is that of the lowest rank, so that the ranks' groups are the same."""
    lowest = (process_set.ranks or [0])[0]
    order = {
        name: place
        for place, name in enumerate(
            broadcast_object(list(names.values()), lowest, process_set=process_set)
        )
    }
    ordered = sorted(names, key=lambda p: order.get(names[p], len(order)))
    if isinstance(groups, int):
        count = min(groups, len(ordered))
        bounds = [len(ordered) * i // count for i in range(count + 1)] if count else []
        return [Group(ordered[a:b]) for a, b in itertools.pairwise(bounds)]
    listed = [[p for p in group if p in names] for group in groups]
    in_a_list = {p for group in listed for p in group}
    singles = [[p] for p in ordered if p not in in_a_list]
    return [Group(group) for group in [*listed, *singles] if group]
