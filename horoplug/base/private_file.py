"""Files that the package writes for its user. csrc/base/private_file.cc has the same rule for the core."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

_OWNER_ONLY = 0o600
# O_NONBLOCK: a pipe without a reader is rejected instead of blocking.
_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def open_private_file(path: str | os.PathLike[str]) -> int:
    """Open or create an empty regular file for writing, which only its owner can read. Returns the descriptor.

    Errors: OSError whose ``strerror`` says why; also for a symbolic link or a further hard link, by which another user
    could let this process overwrite any file, and for a file of another user."""
    with contextlib.suppress(FileExistsError):
        # The owner of a new file may seem to be another user on a network file system.
        return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        reason = "it is a symbolic link; name the file itself"
        raise OSError(errno.ELOOP, reason, os.fspath(path)) from None
    try:
        found = os.fstat(fd)
        if objection := _objection(found):
            raise OSError(errno.EPERM, objection, os.fspath(path))
        if stat.S_IMODE(found.st_mode) != _OWNER_ONLY:
            with contextlib.suppress(OSError):  # a file system without permissions
                os.fchmod(fd, _OWNER_ONLY)
        os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _objection(found: os.stat_result) -> str | None:
    """Why a file that existed must not be written; None: it may be."""
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_uid != os.geteuid():
        return "it belongs to another user; choose another name"
    if found.st_nlink > 1:
        return "the file has a second name (a hard link); remove it first"
    return None
