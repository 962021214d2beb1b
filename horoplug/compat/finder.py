"""An import hook that loads ``horovod`` and its submodules from horoplug, by the tables of
:mod:`horoplug.compat.names`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ClassVar

from horoplug.base.log import logger
from horoplug.compat import attributes, names

# `from horovod.torch import x` looks for the submodule horoplug.torch.x, since that is the module's own name.
_PACKAGES_BY_TARGET = {
    target: name
    for name, target in names.MODULES.items()
    if any(other.startswith(f"{name}.") for other in names.MODULES)
}

_ALIASES: dict[str, list[str]] = {}
for _name, _target in names.MODULES.items():
    _ALIASES.setdefault(_target, []).append(_name)


class Finder(MetaPathFinder):
    """The entry in ``sys.meta_path``."""

    def __init__(self) -> None:
        self._named_real = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module named ``horovod…``; None for other names. Raises ModuleNotFoundError for modules of
        Horovod that horoplug lacks."""
        if fullname.partition(".")[0] != "horovod":
            self._refuse_attribute(fullname, path)
            return None
        if fullname in names.PACKAGES:
            if fullname == "horovod":
                self._name_real()
            return ModuleSpec(fullname, _PackageLoader(), origin="horoplug", is_package=True)
        if fullname in names.MODULES:
            if not _exists(names.MODULES[fullname]):
                raise _missing(fullname)
            return ModuleSpec(fullname, _AliasLoader(names.MODULES[fullname]), origin="horoplug")
        if any(f"{fullname}.".startswith(f"{name}.") for name in names.MISSING):
            raise _missing(fullname)
        package, _, name = fullname.rpartition(".")
        refusal = attributes.refusal(package, name)
        if refusal is not None:
            raise ModuleNotFoundError(refusal, name=package)
        return None

    def _refuse_attribute(self, fullname: str, path: Sequence[str] | None) -> None:
        """Raise ModuleNotFoundError for an attribute of Horovod that horoplug lacks.

        If horoplug.torch has no x, Python handles ``from horovod.torch import x`` by importing horoplug.torch.x."""
        package, _, name = fullname.rpartition(".")
        known = _PACKAGES_BY_TARGET.get(package)
        refusal = attributes.refusal(known, name) if known else None
        if refusal is not None and not PathFinder.find_spec(fullname, path):
            raise ModuleNotFoundError(refusal, name=f"{known}.{name}")

    def _name_real(self) -> None:
        """Log once that an installed Horovod is not used."""
        real = None if self._named_real else PathFinder.find_spec("horovod")
        if real is not None and real.origin is not None:
            self._log_real(f"horovod is horoplug here, not {real.origin}")

    def _log_real(self, text: str) -> None:
        self._named_real = True
        if os.environ.get("HOROVOD_RANK", "0") == "0":  # one rank is enough
            logger.warning("horoplug.compat: %s", text)


class _PackageLoader(Loader):
    """Creates a package without contents of its own."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__file__ = importlib.import_module("horoplug.compat").__file__
        if name == "horovod":
            vars(module)["__version__"] = names.VERSION

        def find(attribute: str) -> Any:
            if attribute == "horoplug_version" and name == "horovod":
                return importlib.import_module("horoplug").__version__
            if f"{name}.{attribute}" in names.ATTRIBUTES:
                known, source = names.ATTRIBUTES[f"{name}.{attribute}"]
                return getattr(importlib.import_module(source), known)
            if f"{name}.{attribute}" in names.MISSING:
                raise AttributeError(attributes.text(f"{name}.{attribute}"))
            raise AttributeError(
                attributes.refusal(name, attribute)
                or f"module {name!r} has no attribute {attribute!r}"
            )

        vars(module)["__getattr__"] = find


class _AliasLoader(Loader):
    """Loads a module of horoplug under a name of Horovod."""

    _specs: ClassVar[dict[str, ModuleSpec | None]] = {}  # the original specs of horoplug's modules

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        # Keep the first spec: another thread may import the module under another alias and replace its spec.
        self._specs.setdefault(self._target, module.__spec__)
        _add_names()
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[self._target]  # the import has set the alias's spec


def _add_names() -> None:
    """Add Horovod's further attributes to the loaded modules of horoplug. (hvd.mpi_ops works without an import.)"""
    for target, aliases in _ALIASES.items():
        module = sys.modules.get(target)
        if module is not None:
            attributes.extend(module, aliases)


def install() -> Finder:
    """See :func:`horoplug.compat.install`. Returns the finder in ``sys.meta_path``."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder):
            return finder
    finder = Finder()
    there = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    if there:
        for name in there:
            del sys.modules[name]
        finder._log_real("horovod, which was imported already, is horoplug from now on")
    sys.meta_path.insert(0, finder)
    return finder


def _exists(module: str) -> bool:
    """Whether horoplug has the module. Imports only its parent packages."""
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _missing(name: str) -> ModuleNotFoundError:
    # `from x import y` swallows an error about the module x.y and reports only that x has no y. So the error names the
    # module of horoplug instead.
    return ModuleNotFoundError(attributes.text(name), name=name.replace("horovod", "horoplug", 1))
