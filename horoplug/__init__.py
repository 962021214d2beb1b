"""Data-parallel training for any framework: ``import horoplug as hvd`` for NumPy, ``import horoplug.torch as hvd`` for
PyTorch.

Importing the package loads nothing else: the NumPy functions (``hvd.init``, ``hvd.allreduce`` and so on) are imported
from :mod:`horoplug.numpy` on first use. So the launcher starts fast, and works where NumPy or the core is missing.
"""

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from horoplug.numpy import *  # noqa: F403
    from horoplug.runner.run import RankError as RankError
    from horoplug.runner.run import run as run

    __version__: str

_LAUNCHER_NAMES = ("RankError", "run")


if not _typing.TYPE_CHECKING:  # to which every name would seem to exist

    def __getattr__(name: str) -> _typing.Any:
        value = globals()[name] = _find(name)  # the next access does not come here
        return value


def _find(name: str) -> _typing.Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("horoplug")
        except PackageNotFoundError:  # run from a checkout
            return _import_module("horoplug._native").version()
    if name == "__all__":
        return _functions()
    if name in _LAUNCHER_NAMES:
        return getattr(_import_module("horoplug.runner.run"), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'horoplug' has no attribute {name!r}")
    return getattr(_import_module("horoplug.numpy"), name)


def _functions() -> list[str]:
    names: list[str] = _import_module("horoplug.numpy").__all__
    return names


def __dir__() -> list[str]:
    return sorted({*globals(), *_functions(), *_LAUNCHER_NAMES, "__version__"})
