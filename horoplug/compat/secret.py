"""``horovod.runner.common.util.secret``."""

import hashlib
import hmac
import secrets
from typing import Final

from horoplug.base.variables import SECRET_BYTES

SECRET_LENGTH: Final = SECRET_BYTES
DIGEST_LENGTH: Final = hashlib.sha256().digest_size
HOROVOD_SECRET_KEY: Final = "_HOROVOD_SECRET_KEY"
"""The variable that has the secret of a job."""


def make_secret_key() -> bytes:
    """A new secret for a job."""
    return secrets.token_bytes(SECRET_BYTES)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The HMAC-SHA-256 of a message."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether ``digest`` is that of the message. Takes the same time whichever it is."""
    return hmac.compare_digest(compute_digest(key, message), digest)
