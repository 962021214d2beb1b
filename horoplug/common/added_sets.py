"""The process sets that a program has added, which ``hvd.elastic.run`` registers again after a reset. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

Ranks = tuple[int, ...]


class RegisteredProcessSet(Protocol):
    """A process set of the current job; see :mod:`horoplug.common.process_sets`."""

    process_set_id: int | None

    @property
    def ranks(self) -> list[int] | None: ...
    def _invalidate(self) -> None: ...


class AddedSets:
    """The sets that ``add_process_set`` has added and the program has not removed, in the order of registration.

    A set is known by its ranks, whatever processes have them. After a reset, the job has the sets that all ranks had
    which were in the job before (:meth:`agree`). The program of a new process has not added them, and the other ones
    may add theirs again, in a reset callback or in the training function. Therefore each rank *claims* a restored
    set once, by ``add_process_set``: that sends nothing, so that ranks need not do it together."""

    def __init__(self) -> None:
        self.is_newcomer = True
        """Whether ``init`` has never returned in this process, so that its program cannot have added a set."""
        self._objects: dict[Ranks, list[RegisteredProcessSet]] = {}  # the program's, by set
        self._unclaimed: dict[Ranks, int | None] = {}  # ids; None: not all of the ranks exist now

    def __iter__(self) -> Iterator[Ranks]:
        return iter(self._objects)

    def first_object(self, ranks: Ranks) -> RegisteredProcessSet | None:
        """An object of the program for a set; None in a new process."""
        return next(iter(self._objects[ranks]), None)

    def add(self, process_set: RegisteredProcessSet) -> None:
        """The program has added a set."""
        self._objects[_key(process_set)] = [process_set]

    def claim(self, process_set: RegisteredProcessSet) -> bool:
        """The program adds a set. Returns False if it was not restored, or if it was claimed before."""
        ranks = _key(process_set)
        if ranks not in self._unclaimed:
            return False
        process_set.process_set_id = self._unclaimed.pop(ranks)
        if not self._has(process_set):
            self._objects[ranks].append(process_set)
        return True

    def remove(self, ranks: Sequence[int]) -> None:
        """The program has removed the set of these ranks, with all objects for it."""
        self._unclaimed.pop(tuple(ranks), None)
        for each in self._objects.pop(tuple(ranks), ()):
            each._invalidate()

    def drop(self, process_set: RegisteredProcessSet) -> bool:
        """The program removes a set. Returns False if this object was not added."""
        found = self._has(process_set)
        if found:
            self.remove(_key(process_set))
        return found

    def agree(self, lists: Sequence[Sequence[Ranks] | None]) -> None:
        """Keep the sets that all ranks have. ``lists``: by rank, those of each; None: its program has just begun, and
        takes over the sets of the others."""
        known = [list(each) for each in lists if each is not None]
        first = known[0] if known else []
        common = [ranks for ranks in first if all(ranks in each for each in known)]
        self._objects = {ranks: self._objects.get(ranks, []) for ranks in common}
        self._unclaimed = {}

    def restore(self, ranks: Ranks, registered: RegisteredProcessSet) -> None:
        """A set of :meth:`agree` was registered again, or was left out because not all of its ranks exist. Its objects
        get the id of ``registered``, which is one of them, or a first one."""
        objects = self._objects[ranks] = self._objects[ranks] or [registered]
        self._unclaimed[ranks] = number = registered.process_set_id
        for each in objects:
            each.process_set_id = number

    def invalidate(self) -> None:
        """The job has ended; it may be formed again."""
        self._unclaimed = {}
        for objects in self._objects.values():
            for each in objects:
                each._invalidate()

    def clear(self) -> None:
        """The program has left the job. Its sets are not registered again."""
        self.invalidate()
        self._objects = {}

    def _has(self, process_set: RegisteredProcessSet) -> bool:
        return any(each is process_set for each in self._objects.get(_key(process_set), ()))


def _key(process_set: RegisteredProcessSet) -> Ranks:
    return tuple(process_set.ranks or ())
