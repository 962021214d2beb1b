"""The exceptions that a training script may want to catch. Names and base classes are Horovod's."""

from horoplug.base.errors import HorovodInternalError as HorovodInternalError
from horoplug.base.errors import HorovodVersionMismatchError as HorovodVersionMismatchError
from horoplug.base.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from horoplug.base.errors import NotInitializedError as NotInitializedError
from horoplug.base.surface import declare as _declare

_declare(globals())
