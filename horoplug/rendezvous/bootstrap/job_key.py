"""The secret of a job whose launcher gives it none.

It is made of a key of the user's and of the job's name, by HMAC, so that no two jobs have the same. The key is
``HOROPLUG_SECRET_KEY`` if that is set, else a file in the user's home, which the hosts of a cluster normally share:
whoever can read that file can do whatever the user can, anyway."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from horoplug.base.config import SECRET_BYTES, parse_secret

REMEDY = (
    "set HOROPLUG_SECRET_KEY to the same 64 hexadecimal digits for all ranks "
    '(python -c "import secrets; print(secrets.token_hex())" makes some)'
)
_PATIENCE = 5.0  # seconds until a file that another host has made must be seen here


def job_secret(given: bytes | None, job: str) -> bytes:
    """The secret of a job, 32 bytes. ``given``: what ``HOROPLUG_SECRET_KEY`` says; ``job``: its name.

    Errors: ValueError of one line if the user's key cannot be made or is not private."""
    key = given if given is not None else user_key()
    return hmac.new(key, b"horoplug job\0" + job.encode(), hashlib.sha256).digest()


def key_file() -> Path:
    """Where the user's key is: in ``$XDG_CONFIG_HOME``, by default ``~/.config``."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(folder) if os.path.isabs(folder) else Path("~/.config").expanduser()
    return base / "horoplug" / "key"


def user_key() -> bytes:
    """The user's key, 32 bytes; it is made when it is asked for first. Errors: ValueError of one line."""
    path = key_file()
    try:
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        _make(path)
        return _read_soon(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the key for this job's secret, {path}: {reason}; {REMEDY}") from None


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        text = file.read(4 * SECRET_BYTES)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ValueError(f"{path} is not a file of this user's; remove it, or {REMEDY}")
    if status.st_mode & 0o077:
        raise ValueError(
            f"{path} can be read or changed by other users, so it keeps no secret: remove it (a new one is made)"
        )
    try:
        return parse_secret(text.decode("ascii"))
    except ValueError:
        raise ValueError(f"{path} holds no key: remove it (a new one is made)") from None


def _make(path: Path) -> None:
    """Make the file unless it is there. It appears complete, and if several processes or hosts make it at once, then
    all of them see the same one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".key-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        # Closed, it is complete for other hosts. (Not flushed to the disk, which can take a minute on a busy one.)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _read_soon(path: Path) -> bytes:
    """Read a file that exists. (On a network's file system this host may remember for a moment that it did not.)"""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return _read(path)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
