"""What can go wrong before ranks are connected. Every message is one line that names the culprit."""

from __future__ import annotations

from collections.abc import Sequence

from horoplug.common.errors import HorovodInternalError


class RendezvousError(RuntimeError):
    """The ranks of a job could not be brought together."""


class AuthenticationError(RendezvousError):
    """The other end of a connection does not know this job's secret, or speaks another protocol."""


class WrongSecretError(AuthenticationError):
    """The other end speaks the protocol, and has refused this process because it does not know the secret."""


class ProtocolError(RendezvousError):
    """The other end, although it knows the secret, sent something that makes no sense."""


class RankTakenError(RendezvousError):
    """Another live process of this job has the same rank."""


class PeerLostError(RendezvousError, HorovodInternalError):
    """A rank ended, or gave up, before the ranks were connected. ``rank`` is its number."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class StoreTimeoutError(RendezvousError, TimeoutError):
    """Keys were not set in time. ``missing`` are their positions in the call's list."""

    def __init__(self, missing: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class MissingRanksError(RendezvousError, TimeoutError):
    """Some ranks did not turn up in time. ``ranks`` are their numbers."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
