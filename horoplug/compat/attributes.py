"""Looks up the names of Horovod that a module of horoplug lacks, by the tables of :mod:`horoplug.compat.surface` and
:mod:`horoplug.compat.decisions`."""

import dis
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

from horoplug.compat import decisions, names, surface


class Place(NamedTuple):
    """Where a name is: in a module, under a name of its own; an empty name is the module itself."""

    module: str
    name: str


def _pairs(words: str) -> Iterator[tuple[str, str]]:
    """(name, original) for each word ``name``, ``name=original`` or ``name=``."""
    for word in words.split():
        name, renamed, original = word.partition("=")
        yield name, original if renamed else name


@functools.cache
def imported_by_horovod(module: str) -> dict[str, Place]:
    """The names that a module of Horovod imports from other modules of Horovod."""
    sources = surface.IMPORTED.get(module, {})
    return {n: Place(source, o) for source, ws in sources.items() for n, o in _pairs(ws)}


def names_of(module: str) -> set[str]:
    """All names of a module of Horovod."""
    return {*surface.OWN.get(module, "").split(), *imported_by_horovod(module)}


@functools.cache
def equivalents_of(module: str) -> dict[str, Place]:
    """The names of a module of Horovod that have an equivalent elsewhere."""
    table = decisions.EQUIVALENTS
    return {n: Place(by, o) for by in table for n, o in _pairs(table[by].get(module, ""))}


@functools.cache
def lacking_in(module: str) -> dict[str, str]:
    """The names of a module of Horovod that horoplug does not have, with what to use instead."""
    rows = decisions.LACKING.items()
    return {name: advice for (of, words), advice in rows if of == module for name in words.split()}


def text(name: str, advice: str = "") -> str:
    """The error for a name that horoplug does not have."""
    return (
        f"horoplug does not provide {name}: {advice}"
        if advice
        else f"horoplug does not provide {name} yet"
    )


def refusal(module: str, name: str) -> str | None:
    """Why ``module.name`` of Horovod does not exist here; None: it is no name of Horovod."""
    if name not in names_of(module):
        return None
    place = imported_by_horovod(module).get(name)
    if place is None:
        return text(f"{module}.{name}", lacking_in(module).get(name, ""))
    if not _is_missing(place.module) and place.name:
        return refusal(*place) or text(f"{place.module}.{place.name}")
    return text(f"{place.module}.{place.name}".removesuffix("."))


def _is_missing(module: str) -> bool:
    return any(f"{module}.".startswith(f"{missing}.") for missing in names.MISSING)


def find(module: str, name: str) -> Any:
    """The attribute ``name`` of a module of Horovod, which horoplug's module lacks. Raises AttributeError."""
    place = equivalents_of(module).get(name) or imported_by_horovod(module).get(name)
    if place is None or _is_missing(place.module):
        raise AttributeError(refusal(module, name))
    found = importlib.import_module(place.module)
    return getattr(found, place.name) if place.name else found


def extend(module: ModuleType, aliases: Iterable[str]) -> None:
    """Let a module of horoplug have all names of the modules of Horovod for which it stands. Idempotent."""
    own: Callable[[str], Any] | None = vars(module).get("__getattr__")
    if isinstance(own, _Lookup):
        return
    vars(module)["__getattr__"] = _Lookup(module.__name__, tuple(aliases), own)


# IMPORT_FROM is the instruction of `from x import y`.
_IMPORT_FROM: Final = dis.opmap["IMPORT_FROM"]


def _imports_from(frame: FrameType) -> bool:
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


class _Lookup:
    """The ``__getattr__`` of a module of horoplug that stands for modules of Horovod."""

    def __init__(
        self, module: str, aliases: tuple[str, ...], own: Callable[[str], Any] | None
    ) -> None:
        self._module = module
        self._aliases = aliases
        self._own = own

    def __call__(self, name: str) -> Any:
        if self._own is not None:
            try:
                return self._own(name)
            except AttributeError:
                pass
        for alias in self._aliases:
            if name not in names_of(alias):
                continue
            try:
                return find(alias, name)
            except (AttributeError, ImportError) as error:
                # `from x import y` replaces the text of an AttributeError by its own.
                kind = ImportError if _imports_from(sys._getframe(1)) else AttributeError
                raise kind(
                    refusal(alias, name) if isinstance(error, AttributeError) else str(error)
                ) from None
        raise AttributeError(f"module {self._module!r} has no attribute {name!r}")
