"""The exceptions that a training script may want to catch. Names and base classes are Horovod's."""

from horoplug.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    NotInitializedError,
)

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "NotInitializedError",
]
