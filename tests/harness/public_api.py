"""The public names of horoplug: what the pages docs/api/*.md name."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from tests.harness import ROOT

PAGES = ROOT / "docs" / "api"
NAMED = re.compile(r"^::: (horoplug[\w.]*)", re.MULTILINE)

COMMON = "horoplug.torch"
"""The module under whose name index.md lists what all modules of FRAMEWORKS share."""

FRAMEWORKS = (
    "horoplug",
    "horoplug.torch",
    "horoplug.tensorflow",
    "horoplug.keras",
    "horoplug.tensorflow.keras",
    "horoplug.jax",
    "horoplug.mxnet",
)


class Public(NamedTuple):
    """One name."""

    module: str
    name: str  # with dots for the member of a class
    page: str

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"

    def value(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


def on_page(page: str) -> list[str]:
    """The full names on a page."""
    return NAMED.findall((PAGES / page).read_text())


def constants() -> list[str]:
    """What index.md names in its text: the reductions and the global process set."""
    _, text = (PAGES / "index.md").read_text().split("## Reductions")
    return re.findall(r"`hvd\.(\w+)`", text)


def names_of_all_modules() -> list[str]:
    """The names that index.md gives to every module, without a module."""
    return [name.removeprefix(f"{COMMON}.") for name in on_page("index.md")]


def public() -> Iterator[tuple[str, str]]:
    """(page, full name) for each name on the pages, in their order."""
    for page in sorted(PAGES.glob("*.md")):
        for name in on_page(page.name):
            yield page.name, name


def found(page: str, full_name: str) -> list[Public]:
    """Imports what a page names. A module stands for the names in its ``__all__``."""
    module, _, name = full_name.rpartition(".")
    while True:
        try:
            holder: ModuleType = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:  # a class, whose member is meant
            if error.name != module:
                raise
            module, _, outer = module.rpartition(".")
            name = f"{outer}.{name}"
    value = getattr(holder, name.partition(".")[0])
    if inspect.ismodule(value):
        return [Public(full_name, each, page) for each in value.__all__]
    return [Public(module, name, page)]
