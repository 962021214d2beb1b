"""How values of different ranks become one: the ``op`` argument, with Horovod's numbers."""

import sys
import warnings
from typing import Final

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

_BETWEEN: Final = ("horoplug.", "tensorflow.")

NAMES: Final = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def resolve(op: int | None, average: bool | None = None) -> int:
    """The reduction that ``op`` and its deprecated predecessor ``average`` ask for; neither: Average.

    Raises ValueError if both are given or ``op`` is none of the six."""
    if op is None:
        if average is None:
            return Average
        text = "average= is deprecated: use op=Average or op=Sum"
        warnings.warn(text, DeprecationWarning, stacklevel=_callers_level())
        return Average if average else Sum
    if average is not None:
        raise ValueError("op= supersedes average=: give only one of them.")
    if op not in (Average, Sum, Adasum, Min, Max, Product):
        raise ValueError(f"op={op!r} is no reduction; use one of {', '.join(NAMES)}.")
    return op


def _callers_level() -> int:
    """The ``stacklevel`` of :func:`resolve`'s first caller outside of horoplug and the framework."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    return level


def check_ranks(op: int, size: int | None) -> None:
    """Raises NotImplementedError if ``op`` cannot combine the values of so many ranks: Adasum pairs them up."""
    if op == Adasum and size is not None and size & (size - 1):
        raise NotImplementedError(
            f"op=Adasum is not implemented for {size} ranks, only for a power of two; use 2, 4, 8 ... ranks, a process "
            "set of so many, or another op."
        )
