"""Errors of the estimators: each message is one line that says what to do."""

from __future__ import annotations

import importlib
from typing import Any, Final

_PACKAGES: Final = {"fsspec": "fsspec", "tqdm": "tqdm"}


class EstimatorError(ValueError):
    """A parameter, a column or the data of an estimator is unusable."""


class StoreError(OSError):
    """A store cannot be read or written."""


def needed(module: str) -> Any:
    """Import an optional module. Raises ImportError with one line that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _PACKAGES.get(module.partition(".")[0], "'horoplug[spark]'")
        raise ImportError(
            f"horoplug.spark needs {module.partition('.')[0]}: pip install {package}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its class."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
