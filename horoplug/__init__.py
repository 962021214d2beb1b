"""Data-parallel training for any framework: ``import horoplug as hvd`` for NumPy, ``import horoplug.torch as hvd`` for
PyTorch.

Importing the package loads nothing else: the NumPy functions (``hvd.init``, ``hvd.allreduce`` and so on) are imported
from :mod:`horoplug.numpy` on first use. So the launcher starts fast, and works where NumPy or the core is missing.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horoplug.numpy import *  # noqa: F403
    from horoplug.runner.run import RankError as RankError
    from horoplug.runner.run import run as run

    __version__: str

_LAUNCHER_NAMES = ("RankError", "run")


if not TYPE_CHECKING:  # to which every name would seem to exist

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("horoplug")
            except PackageNotFoundError:  # run from a checkout
                return import_module("horoplug._native").version()
        if name == "__all__":
            return _functions()
        if name in _LAUNCHER_NAMES:
            return getattr(import_module("horoplug.runner.run"), name)
        if name.startswith("_"):
            raise AttributeError(f"module 'horoplug' has no attribute {name!r}")
        return getattr(import_module("horoplug.numpy"), name)


def _functions() -> list[str]:
    public = vars(import_module("horoplug.numpy")).items()
    return [
        name
        for name, value in public
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]


def __dir__() -> list[str]:
    return sorted({*globals(), *_functions(), *_LAUNCHER_NAMES, "__version__"})
