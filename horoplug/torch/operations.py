"""The operations on PyTorch tensors, generated from the table in :mod:`horoplug.common.opspec`. Editors and type
checkers see them in operations.pyi."""

from horoplug.common.variants import operations
from horoplug.torch.adapter import ADAPTER

_FUNCTIONS = operations(ADAPTER, __name__)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
