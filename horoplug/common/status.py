"""From the core's outcomes to Python: numbers and exceptions."""

from typing import Final

from horoplug._native import Engine, Error
from horoplug.base.errors import HorovodInternalError

INVALID_ARGUMENT: Final = 2
DUPLICATE_NAME: Final = 3
UNSUPPORTED: Final = 4
MISMATCH: Final = 5

# The caller's own mistakes, found before anything was sent. Every other failure concerns all ranks.
_LOCAL: Final = (INVALID_ARGUMENT, DUPLICATE_NAME, UNSUPPORTED)


def exception(error: Error) -> ValueError | HorovodInternalError:
    """What to raise for a failed call: ValueError where the caller can mend it, else HorovodInternalError, which
    elastic training recovers from."""
    status, message = error.args
    return ValueError(message) if status in _LOCAL else HorovodInternalError(message)


def await_value(engine: Engine, handle: int) -> int:
    """Wait for an operation without tensors and return the number that it has produced; frees the handle.

    Raises the core's Error if it failed."""
    try:
        engine.wait(handle)
        return engine.value(handle)
    finally:
        engine.release(handle)
