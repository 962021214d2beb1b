"""Files that hold a key: the user's own, or one that a scheduler provides (a secret of Kubernetes, for example)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from horoplug.base.variables import SECRET_BYTES, parse_secret

# Permissions with which a file is no secret. Root may let a group read its own.
_OPEN, _ROOTS_OPEN = 0o077, 0o037


def read_secret_file(path: str | Path, remedy: str, *, provided: bool = False) -> bytes:
    """The 32 bytes of the key in a file, which contains them as hex or base64.

    ``remedy``: what the user can do, for messages; ``provided``: whether the file may belong to root. Errors: OSError;
    ValueError of one line if the file is not private or holds no key."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        text = file.read(4 * SECRET_BYTES)
    owned = status.st_uid == os.geteuid()
    if not stat.S_ISREG(status.st_mode) or not (owned or (provided and status.st_uid == 0)):
        raise ValueError(f"{path} is not a file of this user's; {remedy}")
    if status.st_mode & (_OPEN if owned else _ROOTS_OPEN):
        raise ValueError(
            f"{path} can be read or changed by other users, so it keeps no secret; {remedy}"
        )
    try:
        return parse_secret(text.decode("ascii"))
    except ValueError:
        raise ValueError(f"{path} holds no key of 32 bytes as hex or base64; {remedy}") from None
