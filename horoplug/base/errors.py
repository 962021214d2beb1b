"""The exception classes of ``import horoplug.torch as hvd`` and its like. The page docs/api/index.md lists those of the
launchers as well.

The names and base classes of the first group are Horovod's: training scripts catch them. The second group,
:class:`RendezvousError` and its subclasses, is raised while the ranks of a job find and connect to each other; each
message is one line that names the rank or address at fault. Users import both groups from
:mod:`horoplug.common.errors` and :mod:`horoplug.rendezvous.errors`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_Class = TypeVar("_Class", bound=type)


def _public(module: str) -> Callable[[_Class], _Class]:
    """Class decorator: tracebacks and pickles name the module from which users import the class."""

    def set_module(cls: _Class) -> _Class:
        cls.__module__ = module
        return cls

    return set_module


@_public("horoplug.common.errors")
class HorovodInternalError(RuntimeError):
    """An operation failed because the job is broken: a rank died, a link broke, a deadline passed. Or the ranks
    disagree about the operation; then the job goes on.

    Elastic training catches this, restores the last committed state and starts again.

    Example, on two ranks:

        hvd.broadcast_object("a", root_rank=hvd.rank())  # raises HorovodInternalError
        hvd.size()  # -> 2
    """

    _status: int | None = None  # the core's, if it has failed


@_public("horoplug.common.errors")
class HostsUpdatedInterrupt(RuntimeError):
    """Hosts joined or left the job; raised between steps, so nothing has to be restored.

    ``skip_sync``: hosts only left, so that the state of the ranks that remain is already the same. False in an elastic
    job, in which the next membership says who must synchronize.

    Example:

        def commit():
            raise hvd.HostsUpdatedInterrupt(skip_sync=True)

        try:
            commit()
        except hvd.HostsUpdatedInterrupt as interrupt:
            kept = interrupt.skip_sync
        kept  # -> True
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(
            "hosts left the job" if skip_sync else "the set of hosts of this job has changed"
        )
        self.skip_sync = skip_sync


@_public("horoplug.common.errors")
class HorovodVersionMismatchError(ImportError):
    """A framework's version is not the one that an extension was built for.

    ``name``: the framework; ``version``: the one found; ``installed_version``: the one built for.

    Example:

        try:
            raise hvd.HorovodVersionMismatchError("torch", "2.1.0", "2.13.0")
        except ImportError as error:
            found = error.version
        found  # -> "2.1.0"
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} is version {version}, but horoplug was built for {installed_version}; "
            "reinstall one of them so that they match"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version


@_public("horoplug.common.errors")
class NotInitializedError(ValueError):
    """A function that needs :func:`init` was called before it, or after :func:`shutdown`.

    Example, on two ranks:

        hvd.shutdown()
        hvd.rank()  # raises NotInitializedError
        hvd.init()
    """

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init()")


# ---- rendezvous -----------------------------------------------------------------------------------------------------


@_public("horoplug.rendezvous.errors")
class RendezvousError(RuntimeError):
    """The ranks of a job could not connect to each other."""


@_public("horoplug.rendezvous.errors")
class AuthenticationError(RendezvousError):
    """The other end of a connection does not know this job's secret, or speaks another protocol."""


@_public("horoplug.rendezvous.errors")
class WrongSecretError(AuthenticationError):
    """The other end speaks the protocol and rejected this process, because the two processes have different secrets."""


@_public("horoplug.rendezvous.errors")
class TamperedMessageError(AuthenticationError, HorovodInternalError):
    """A message or an object was changed, repeated or reordered between two ranks, or another process has made it. It
    was discarded."""


@_public("horoplug.rendezvous.errors")
class ProtocolError(RendezvousError):
    """The other end knows the secret, but sent an invalid message."""


@_public("horoplug.rendezvous.errors")
class RankTakenError(RendezvousError):
    """Another live process of this job has the same rank."""


@_public("horoplug.rendezvous.errors")
class PeerLostError(RendezvousError, HorovodInternalError):
    """A rank ended, or gave up, before the ranks were connected. ``rank``: its number."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, str(self))


@_public("horoplug.rendezvous.errors")
class StoreTimeoutError(RendezvousError, TimeoutError):
    """Keys of the rendezvous store were not set in time. ``missing``: their positions in the list of the call."""

    def __init__(self, missing: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.missing, str(self))


@_public("horoplug.rendezvous.errors")
class MissingRanksError(RendezvousError, TimeoutError):
    """Some ranks did not connect in time. ``ranks``: their numbers; empty if they are unknown."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.ranks, str(self))


def not_an_optimizer(expected: str, given: object, function: str = "DistributedOptimizer") -> str:
    """The message for an argument that is no optimizer. ``expected``: what the function takes."""
    if isinstance(given, type):
        found = f"the class {given.__name__}; pass an object of it"
    else:
        found = "None" if given is None else type(given).__name__
    return f"{function} takes {expected}, got {found}"
