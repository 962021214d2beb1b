"""The secret of a job whose launcher does not provide one.

It is the HMAC of the job's name under the user's key, so that no two jobs share a secret. The key is
``HOROPLUG_SECRET_KEY`` or the content of ``HOROPLUG_SECRET_FILE`` if one of them is set, else a file in the user's home
folder, which the hosts of a cluster normally share. Whoever can read that file has the user's permissions, and could
attack the job without it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from horoplug.base.secret_file import read_secret_file
from horoplug.base.variables import SECRET_BYTES

REMEDY = (
    "set HOROPLUG_SECRET_FILE, or HOROPLUG_SECRET_KEY, to the same 64 hexadecimal digits for all ranks "
    '(python -c "import secrets; print(secrets.token_hex())" makes some)'
)
_VISIBLE_SECONDS = 5.0  # limit until a file that another host has created is visible here


def job_secret(given: bytes | None, job: str) -> bytes:
    """The secret of a job, 32 bytes. ``given``: the key that the environment gives; ``job``: the job's name.

    Errors: ValueError with a one-line message if the user's key cannot be created or is not private."""
    return derive(given if given is not None else user_key(), job)


def derive(key: bytes, job: str) -> bytes:
    """The secret of a job, derived from a key. The key cannot be computed from the secret."""
    return hmac.new(key, b"horoplug job\0" + job.encode(), hashlib.sha256).digest()


def key_file() -> Path:
    """Path of the user's key: in ``$XDG_CONFIG_HOME``, by default ``~/.config``."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(folder) if os.path.isabs(folder) else Path("~/.config").expanduser()
    return base / "horoplug" / "key"


def user_key() -> bytes:
    """The user's key, 32 bytes; created when it is first needed. Errors: ValueError with a one-line message."""
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
    return read_secret_file(path, f"remove it (a new one is made), or {REMEDY}")


def _make(path: Path) -> None:
    """Create the file unless it exists. It appears complete, and if several processes or hosts create it at once, all
    of them get the same one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".key-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        # A closed file is complete for other hosts. (No fsync, which can take a minute on a busy disk.)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


def _read_soon(path: Path) -> bytes:
    """Read a file that exists. (On a network file system, this host may have cached its absence for a moment.)"""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while True:
        try:
            return _read(path)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
