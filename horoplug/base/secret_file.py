"""Files that hold a key: the user's own, or one that a scheduler provides (a secret of Kubernetes, for example)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from horoplug.base.variables import SECRET_BYTES, parse_secret

# Permission bits that make a file unsafe: of a file that this user owns, and of one that root owns. The latter may be
# readable by a group.
_OPEN, _ROOTS_OPEN = 0o077, 0o037


def read_secret_file(path: str | Path, remedy: str, *, provided: bool = False) -> bytes:
    """Read a key of 32 bytes from a file that contains it as hex or base64.

    ``remedy``: advice for the user, which is appended to error messages; ``provided``: whether root may own the file.
    Errors: OSError; ValueError with a one-line message if other users can read or change the file, or if it contains no
    key."""
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
