"""Checks that every argument of the public functions has an effect: a call with another value has another outcome.

A table has a row for each argument of each function. An argument without a row is an error: a new one needs a row."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness import ROOT

DOCUMENTED = ROOT / "docs" / "migrating-from-horovod.md"


class NoEffect(NamedTuple):
    """Horovod has the argument; here it has deliberately no effect. The users' guide lists it."""

    reason: str


class ShownBy(NamedTuple):
    """A test of its own shows the effect."""

    path: str


class Outcomes(NamedTuple):
    """What returns the outcomes without and with the argument changed."""

    of: Callable[[], tuple[Any, Any]]


Function = Callable[..., Any]
Rows = Mapping[
    str, Any
]  # by argument: one of the classes above, or another value than the usual one


def public_functions(module: Any, known: Any = None) -> dict[str, Function]:
    """The functions and classes of horoplug that a module exports, without those that the module ``known`` exports."""
    found = {}
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or not callable(value) or value is getattr(known, name, None):
            continue
        if isinstance(value, type) and issubclass(value, BaseException):
            continue
        if getattr(value, "_is_protocol", False):  # is in annotations only
            continue
        if str(getattr(value, "__module__", "")).startswith("horoplug"):
            found[name] = value
    return found


def outcome(call: Callable[[], Any]) -> str:
    """A text that differs if the result or the error of a call differs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return shown(call())
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def shown(value: Any) -> str:
    """The value as a text, with the elements of arrays and without addresses."""
    if isinstance(value, Mapping):
        return str({key: shown(each) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return str([shown(each) for each in value])
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return f"{value.dtype}{value.tolist()}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def check_rows(functions: Mapping[str, Function], rows: Callable[[str], Rows]) -> None:
    """Raises AssertionError for an argument without a row, a row without an argument, an argument without effect that
    the guide does not list, and a row whose test does not exist."""
    documented = DOCUMENTED.read_text()
    problems = []
    for name, function in functions.items():
        table = rows(name)
        parameters = inspect.signature(function).parameters
        problems += [f"{name}({each}=) has no row" for each in parameters if each not in table]
        problems += [f"{name} has no argument {each}" for each in table if each not in parameters]
        for argument, row in table.items():
            if isinstance(row, NoEffect) and f"`{name}({argument})`" not in documented:
                problems.append(f"{DOCUMENTED.name} does not list `{name}({argument})`")
            if isinstance(row, ShownBy) and not Path(ROOT, row.path).exists():
                problems.append(f"{name}({argument}=): {row.path} does not exist")
    assert not problems, "\n".join(problems)


def without_effect(
    functions: Mapping[str, Function],
    usual: Callable[[str], Mapping[str, Any]],
    rows: Callable[[str], Rows],
    run: Callable[[Function, Mapping[str, Any]], Any],
) -> list[str]:
    """The arguments whose change this rank does not see. ``usual``: the usual arguments of a function. ``rows``: its
    rows of the table. ``run``: calls a function with arguments; the result is compared.

    Raises the AssertionError of :func:`check_rows`."""
    check_rows(functions, rows)
    unseen = []
    for name, function in functions.items():
        standard = None
        for argument, row in rows(name).items():
            if isinstance(row, (NoEffect, ShownBy)):
                continue
            if isinstance(row, Outcomes):
                before, after = map(shown, row.of())
            else:
                if standard is None:
                    standard = outcome(lambda f=function, n=name: run(f, usual(n)))
                before = standard
                changed = {**usual(name), argument: row}
                after = outcome(lambda f=function, c=changed: run(f, c))
            if before == after:
                unseen.append(f"{name}({argument}=): {before[:200]}")
    return unseen
