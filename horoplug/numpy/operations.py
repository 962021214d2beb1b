"""The operations on NumPy arrays, generated from the table in :mod:`horoplug.common.opspec`. Editors and type checkers
see them in operations.pyi."""

from horoplug.common.variants import operations
from horoplug.numpy.adapter import NumpyAdapter

_FUNCTIONS = operations(NumpyAdapter(), __name__)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
