"""The public names of horoplug: what the pages docs/api/*.md name."""

import importlib
import inspect
import re
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
    name: str

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}"

    def value(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


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


def public() -> list[str]:
    """The full names on all pages."""
    return [name for page in sorted(PAGES.glob("*.md")) for name in on_page(page.name)]


def found(full_name: str) -> list[Public]:
    """Imports what a page names. A module stands for the names in its ``__all__``."""
    module, _, name = full_name.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value):
        return [Public(full_name, each) for each in value.__all__]
    return [Public(module, name)]
