"""The dtypes of the core, by code (``hp_dtype`` of the C ABI) and by name. The names are those of NumPy, which other
frameworks use as well; a framework supports those dtypes for which it has an attribute."""

from collections.abc import Iterable
from typing import Final

from horoplug import _native

NAMES: Final = tuple(name for _, name, _ in _native.dtypes())
"""By code."""
CODES: Final = {name: code for code, name, _ in _native.dtypes()}
SIZES: Final = {name: size for _, name, size in _native.dtypes()}
"""Bytes of an element."""
BOOL: Final = CODES["bool"]


def unsupported(dtype: object, supported: Iterable[object]) -> ValueError:
    """The error for a tensor whose dtype is none of ``supported``."""
    names = ", ".join(str(name) for name in supported)
    return ValueError(f"dtype {dtype} is not supported; convert the tensor to one of: {names}.")
