"""The types of work that the core has accepted and the program has not waited for yet.

:class:`horoplug.common.context.Context` maps every handle that a user holds to one object of these types, which keeps
the tensors of the operation alive until the core has finished with them:

- :class:`Waitable`: one handle. An operation, a group that was submitted in parts, or one member of a batch.
- :class:`InFlight`: any number of handles. A :class:`Waitable`, or a batch.
"""

from abc import ABC, abstractmethod
from typing import Any


class InFlight(ABC):
    """Work behind one or more handles."""

    __slots__ = ()

    @abstractmethod
    def waitable(self, handle: int) -> "Waitable":
        """The operation that belongs to ``handle``, one of the handles of this object."""

    @abstractmethod
    def abandon(self) -> None:
        """Prepare for freeing the tensors without waiting for the operation. On a GPU, work that is enqueued from now
        on in the stream of the tensors runs after the pending work of the operation. Does nothing for tensors in host
        memory."""


class Waitable(InFlight):
    """Work behind one handle."""

    __slots__ = ()

    def waitable(self, handle: int) -> "Waitable":
        return self

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`wait` returns without blocking. The result of an operation on a GPU may only be used after
        :meth:`wait`."""

    @abstractmethod
    def wait(self) -> Any:
        """Block until done; return the output and free the handle.

        Raises HorovodInternalError if the work has failed. After a KeyboardInterrupt the work is still in flight and
        can be waited for again."""
