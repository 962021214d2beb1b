"""``horovod.runner.common.util.secret``."""

import secrets
from typing import Final

from horoplug.base.variables import SECRET_BYTES

HOROVOD_SECRET_KEY: Final = "_HOROVOD_SECRET_KEY"
"""The variable that has the secret of a job."""


def make_secret_key() -> bytes:
    """A new secret for a job."""
    return secrets.token_bytes(SECRET_BYTES)
