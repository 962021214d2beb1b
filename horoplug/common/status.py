"""From the core's failures to Python's exceptions."""

from typing import Final

from horoplug._native import Error
from horoplug.common.errors import HorovodInternalError

INVALID_ARGUMENT: Final = 2
DUPLICATE_NAME: Final = 3
UNSUPPORTED: Final = 4

# The caller's own mistakes, found before anything was sent. Every other failure concerns all ranks.
_LOCAL: Final = (INVALID_ARGUMENT, DUPLICATE_NAME, UNSUPPORTED)


def exception(error: Error) -> ValueError | HorovodInternalError:
    """What to raise for a failed call: ValueError where the caller can mend it, else HorovodInternalError, which
    elastic training recovers from."""
    status, message = error.args
    return ValueError(message) if status in _LOCAL else HorovodInternalError(message)
