"""Converts results of the core to numbers and exceptions of Python."""

from typing import Final

from horoplug._native import Engine, Error, Status
from horoplug.base.errors import HorovodInternalError

# Mistakes of this rank's caller, which the core detects before it sends anything. Other failures concern all ranks.
_LOCAL: Final = (Status.INVALID_ARGUMENT, Status.DUPLICATE_NAME, Status.UNSUPPORTED)


def exception(error: Error) -> ValueError | HorovodInternalError:
    """The exception to raise for a failed call: ValueError for a mistake of the caller, otherwise HorovodInternalError,
    from which elastic training recovers."""
    status, message = error.args
    if status in _LOCAL:
        return ValueError(message)
    failure = HorovodInternalError(message)
    failure._status = status
    return failure


def says_operation_failed(error: BaseException) -> bool:
    """Whether an exception that TensorFlow or XLA has made is a failure of an operation of horoplug on all ranks. They
    pass on no more of it than a code, which they use themselves, and a text: csrc/bindings/common/core_failure.h."""
    return "a Horovod operation has failed" in str(error)


def is_layout_mismatch(failure: Exception) -> bool:
    """Whether an operation failed because its tensors are sparse on some ranks only, or are parts of tensors of other
    sizes. The answer is the same on all ranks."""
    return getattr(failure, "_status", None) == Status.LAYOUT_MISMATCH


def await_value(engine: Engine, handle: int) -> int:
    """Wait for an operation without tensors and return the number that it has produced. Frees the handle.

    Raises the core's Error if it failed."""
    try:
        engine.wait(handle)
        return engine.value(handle)
    finally:
        engine.release(handle)
