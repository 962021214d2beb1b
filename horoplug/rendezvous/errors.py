"""The exceptions that :func:`horoplug.common.basics.init` raises if the ranks of a job cannot be connected."""

from horoplug.base.errors import (
    AuthenticationError,
    MissingRanksError,
    PeerLostError,
    ProtocolError,
    RankTakenError,
    RendezvousError,
    StoreTimeoutError,
    TamperedMessageError,
    WrongSecretError,
)

__all__ = [
    "AuthenticationError",
    "MissingRanksError",
    "PeerLostError",
    "ProtocolError",
    "RankTakenError",
    "RendezvousError",
    "StoreTimeoutError",
    "TamperedMessageError",
    "WrongSecretError",
]
