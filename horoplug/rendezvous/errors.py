"""The exceptions that :func:`horoplug.common.basics.init` raises if the ranks of a job cannot be connected."""

from horoplug.base.errors import AuthenticationError as AuthenticationError
from horoplug.base.errors import MissingRanksError as MissingRanksError
from horoplug.base.errors import PeerLostError as PeerLostError
from horoplug.base.errors import ProtocolError as ProtocolError
from horoplug.base.errors import RankTakenError as RankTakenError
from horoplug.base.errors import RendezvousError as RendezvousError
from horoplug.base.errors import StoreTimeoutError as StoreTimeoutError
from horoplug.base.errors import TamperedMessageError as TamperedMessageError
from horoplug.base.errors import WrongSecretError as WrongSecretError
from horoplug.base.surface import declare as _declare

_declare(globals())
