"""State that a module keeps for the current job, until the next ``init``. The module has it as a typed variable:

_TAGS = PerJob(make_tags)  # at the start of the module
_TAGS.get().seal(...)
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from horoplug.common.context import context

Value = TypeVar("Value")


class PerJob(Generic[Value]):
    """A value that is made at its first use after each ``init``. Thread-safe."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self._made: dict[None, Value] = {}  # one value, or none; atomic, unlike an attribute
        context.at_init(self._made.clear)

    def get(self) -> Value:
        """The value of the current job."""
        found = self._made.get(None)
        return self._made.setdefault(None, self._make()) if found is None else found


class FirstUses:
    """Numbers objects in the order of their first use in the job, which is the same on every rank. The names that a
    framework gives to layers and optimizers may differ between ranks, since they depend on what else a rank has
    created."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next: defaultdict[Hashable, itertools.count[int]] = defaultdict(itertools.count)

    def number(self, used: Any, group: Hashable) -> int:
        """The number of an object among those of its group, from 0."""
        if used not in self._numbers:
            self._numbers[used] = next(self._next[group])
        return self._numbers[used]
