"""Names of an optimizer's parameters, and the groups in which their gradients are reduced."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horoplug.common.grouping import split_indices
from horoplug.common.objects import broadcast_object
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduction_options import ReductionOptions

Stream = tuple[int, int] | None
"""The stream in which a gradient became ready: the ordinal of the GPU and the CUDA stream; None: in host memory."""


class Group(tuple[torch.Tensor, ...]):
    """Parameters whose gradients are reduced together. Compared by identity, so that it is cheap as a key."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class GroupProgress:
    """Counts the ready gradients of each group during backward."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.counts: dict[Group, int] = dict.fromkeys(groups, 0)
        """Number of members whose gradients are ready."""
        self.of: dict[torch.Tensor, Group] = {p: group for group in self.counts for p in group}
        self._streams: dict[Group, set[Stream]] = {}
        self._deferred: list[Group] = []

    def add(self, ready: Iterable[torch.Tensor], stream: Stream) -> list[Group]:
        """Count gradients that became ready in ``stream``. Returns the groups that are now complete and may be
        submitted in this stream. Groups with gradients in several streams are deferred until :meth:`take_deferred`."""
        complete: list[Group] = []
        for group in [self.of[parameter] for parameter in ready]:
            self.counts[group] += 1
            streams = self._streams.setdefault(group, set())
            streams.add(stream)
            if self.counts[group] == len(group):
                (complete if len(streams) == 1 else self._deferred).append(group)
        return complete

    def take_deferred(self) -> list[Group]:
        """The complete groups that were deferred. For the end of backward, where the streams have joined."""
        deferred, self._deferred = self._deferred, []
        return deferred

    def reset(self) -> None:
        """Start again with no gradient ready."""
        self._streams.clear()
        self._deferred = []
        self.counts.update(dict.fromkeys(self.counts, 0))


def name_parameters(
    param_groups: Sequence[Mapping[str, Any]],
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> dict[torch.Tensor, str]:
    """The name of every parameter in ``param_groups``, and of those in ``named_parameters`` that are in no group.

    Raises ValueError if ``named_parameters`` does not consist of pairs, has a name twice, or omits a parameter."""
    if named_parameters is None:
        return {
            p: f"allreduce.noname.{number}.{position}"
            for number, group in enumerate(param_groups)
            for position, p in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ValueError(
            "named_parameters takes pairs (name, parameter), such as those of model.named_parameters()"
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}")
    names = {parameter: name for name, parameter in named}
    nameless = [
        f"parameter {position} of group {number}, shape {tuple(p.shape)}"
        for number, group in enumerate(param_groups)
        for position, p in enumerate(group["params"])
        if p not in names
    ]
    if nameless:
        raise ValueError(
            f"named_parameters leaves out parameters of the optimizer: {'; '.join(nameless)}"
        )
    return names


class Options(ReductionOptions):
    """The options of an optimizer. Raises ValueError for a parameter that is in ``groups`` more than once as well."""

    members = "parameters"
    member_type = torch.Tensor

    def __post_init__(self, num_groups: int) -> None:
        super().__post_init__(num_groups)
        if isinstance(self.groups, list):
            listed = [parameter for group in self.groups for parameter in group]
            if len(set(listed)) < len(listed):
                raise ValueError("groups has a parameter more than once")


def make_groups(
    names: Mapping[torch.Tensor, str],
    groups: int | Sequence[Sequence[torch.Tensor]],
    process_set: ProcessSet,
    *,
    agree: bool = True,
) -> list[Group]:
    """Divide the parameters of ``names`` into groups. ``groups``: the number of groups, which get about equal numbers
    of parameters; or lists of parameters, and every other parameter forms a group.

    ``agree``: take the order of the parameters from the lowest rank, so that all ranks have the same groups, which is
    collective. Otherwise all ranks must have the parameters in the same order."""
    in_order = list(names.values())
    if agree:
        lowest = (process_set.ranks or [0])[0]
        in_order = broadcast_object(in_order, lowest, process_set=process_set)
    order = {name: position for position, name in enumerate(in_order)}
    ordered = sorted(names, key=lambda p: order.get(names[p], len(order)))
    if isinstance(groups, int):
        split = split_indices(range(len(ordered)), groups, ())
        return [Group(ordered[i] for i in indices) for indices in split]
    listed = [[p for p in group if p in names] for group in groups]
    in_a_list = {p for group in listed for p in group}
    singles = [[p] for p in ordered if p not in in_a_list]
    return [Group(group) for group in [*listed, *singles] if group]
