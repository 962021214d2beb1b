"""The operations on PyTorch tensors, generated from the table in :mod:`horoplug.common.opspec`. Editors and type
checkers see them in operations.pyi."""

from horoplug.common.variants import operations
from horoplug.torch.adapter import TorchAdapter

_FUNCTIONS = operations(TorchAdapter(), __name__)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
