"""The reductions: values of the ``op`` argument, which are Horovod's numbers."""

import sys
import warnings
from typing import Final

from horoplug._native import ReduceOp

Average: Final = int(ReduceOp.AVERAGE)
Sum: Final = int(ReduceOp.SUM)
Adasum: Final = int(ReduceOp.ADASUM)
Min: Final = int(ReduceOp.MIN)
Max: Final = int(ReduceOp.MAX)
Product: Final = int(ReduceOp.PRODUCT)

NAMES: Final = tuple(op.name.capitalize() for op in ReduceOp)
"""The names of the reductions, indexed by their number."""

_NUMBERS: Final = frozenset(map(int, ReduceOp))

# Modules that may be between a user's call and resolve().
_LIBRARIES: Final = ("horoplug.", "tensorflow.")


def resolve(op: int | None, average: bool | None = None) -> int:
    """The reduction that ``op``, or its deprecated predecessor ``average``, selects; Average if neither is given.

    Raises ValueError if both are given or ``op`` is not a reduction."""
    if op is None:
        if average is None:
            return Average
        try:
            chosen = Average if average else Sum  # Horovod takes anything that is true or false
        except Exception:  # such as an array of several elements
            kind = type(average).__name__
            raise TypeError(f"average= takes True or False, got {kind}") from None
        text = "average= is deprecated: use op=Average or op=Sum"
        warnings.warn(text, DeprecationWarning, stacklevel=_callers_level())
        return chosen
    if average is not None:
        raise ValueError("op= supersedes average=: give only one of them")
    try:
        is_known = op in _NUMBERS
    except TypeError:  # an unhashable value, such as a list
        is_known = False
    if not is_known:
        text = " ".join(repr(op).split())
        raise ValueError(f"op={text} is not a reduction; use one of {', '.join(NAMES)}")
    return int(op)


def _callers_level() -> int:
    """The ``stacklevel`` of the first caller of :func:`resolve` that is in none of :data:`_LIBRARIES`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level


def check_ranks(op: int, size: int | None) -> None:
    """Raises NotImplementedError if ``op`` does not support this number of ranks: Adasum needs a power of two."""
    if op == Adasum and size is not None and size & (size - 1):
        raise NotImplementedError(
            f"op=Adasum is not implemented for {size} ranks, only for a power of two; use 2, 4, 8 ... ranks, a process "
            "set of that size, or another op"
        )
