"""The dtypes of the core, by code (``hp_dtype`` of the C ABI) and by name. The names are those of NumPy, which other
frameworks use as well; a framework supports those dtypes for which it has an attribute."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from horoplug import _native


class DType(NamedTuple):
    """A row of ``csrc/include/horoplug/dtypes.def``."""

    code: int
    name: str
    size: int
    """Bytes of an element."""
    mpi: str
    """The MPI datatype whose reductions may be used; empty if MPI only moves the bytes."""
    package: str
    """The Python package that defines the NumPy type: numpy or ml_dtypes."""
    dlpack: int
    """DLPack's type code. The number of bits is 8 * ``size``."""


ROWS: Final = tuple(DType(*row) for row in _native.dtypes())
NAMES: Final = tuple(row.name for row in ROWS)
"""The names of all dtypes, indexed by code."""
CODES: Final = {row.name: row.code for row in ROWS}
SIZES: Final = {row.name: row.size for row in ROWS}
"""Bytes of an element."""
BOOL: Final = CODES["bool"]


def unsupported(dtype: object, supported: Iterable[object]) -> ValueError:
    """The error for a tensor whose dtype is none of ``supported``."""
    names = ", ".join(str(name) for name in supported)
    return ValueError(f"dtype {dtype} is not supported; convert the tensor to one of: {names}")
