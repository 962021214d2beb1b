"""Python objects as parts of an elastic state: how they are saved, restored and sent to other ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from horoplug.base.errors import HorovodInternalError
from horoplug.base.pickling import find_unpicklable

_Object = TypeVar("_Object")


class _Kind(NamedTuple):
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def _read_numpy(generator: np.random.Generator) -> Any:
    return generator.bit_generator.state


def _write_numpy(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_kinds: dict[type, _Kind | None] = {
    random.SystemRandom: None,  # a random.Random that has no state
    random.Random: _Kind(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _Kind(_read_numpy, _write_numpy),
    np.random.RandomState: _Kind(np.random.RandomState.get_state, np.random.RandomState.set_state),
}


def keep_in_place(
    kind: type[_Object], read: Callable[[_Object], Any], write: Callable[[_Object, Any], None]
) -> None:
    """Of objects of this class, elastic states save, restore and send only the state. ``read``: returns the state, as
    a copy that can be pickled; ``write``: gives it to an object."""
    _kinds[kind] = _Kind(read, write)


def _kind_of(value: Any) -> _Kind | None:
    return next((_kinds[each] for each in type(value).__mro__ if each in _kinds), None)


class Kept(NamedTuple):
    """The state of an object that stays where it is."""

    state: Any


def keep(value: Any) -> Kept | None:
    """The state of an object whose kind is kept in place; None for others."""
    kind = _kind_of(value)
    return None if kind is None else Kept(kind.read(value))


def put_back(name: str, value: Any, kept: Kept) -> None:
    """Give an object the state that :func:`keep` has returned, here or on another rank. ``name``: of the attribute.
    Raises ValueError if the object is of another kind."""
    kind = _kind_of(value)
    if kind is None:
        raise ValueError(
            f"elastic: the attribute {name!r} is a {type(value).__name__} here, and a generator or the like on another "
            "rank; create the same object on every rank"
        )
    kind.write(value, kept.state)


# ---- what cannot be pickled ------------------------------------------------------------------------------------------


class _Refusal(NamedTuple):
    """What the root sends in place of values that cannot be pickled."""

    text: str


def broadcast_values(
    broadcast: Callable[..., Any],
    values: Mapping[str, Any],
    root_rank: int,
    *,
    is_root: Callable[[], bool],
    what: str = "the attribute",
) -> dict[str, Any]:
    """Broadcast values by their names. Collective. ``broadcast``: of an object, with a root unless that is rank 0: a
    user's function may take none. ``what``: the values are, for error messages.

    Raises ValueError with one line on all ranks if a value cannot be pickled."""
    root = () if root_rank == 0 else (root_rank,)
    try:
        found = broadcast(dict(values), *root)
    except HorovodInternalError:
        raise
    except Exception as error:
        refusal = _refusal(values, what) if is_root() else None
        if refusal is None:
            raise
        broadcast(refusal, *root)
        raise ValueError(refusal.text) from error
    if isinstance(found, _Refusal):
        raise ValueError(found.text)
    return dict(found)


def _refusal(values: Mapping[str, Any], what: str) -> _Refusal | None:
    for name, value in values.items():
        if (found := find_unpicklable(value, only_containers=True)) is not None:
            return _Refusal(
                f"elastic: {what} {name!r}{found.path}, a {type(found.value).__name__}, cannot be sent to new "
                f"processes, since it cannot be pickled ({found.why}); keep it outside of the state, and what it is "
                "made from in it"
            )
    return None
