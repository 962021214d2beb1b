"""The limit on open files, which jobs of many ranks reach: a rank has a few descriptors for each rank it talks to."""

from __future__ import annotations

import contextlib
import errno
import resource

_MOST = 1 << 20  # some programs loop over all possible descriptors, for example to close them


def raise_limit() -> int:
    """Raise this process's soft limit on open files to the hard limit, up to about a million, and return the limit.

    The processes that this process starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = _number(soft), min(_number(hard), _MOST)
    if soft < most:
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return soft


def limit() -> int:
    """The number of files that this process may open."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def reason(error: OSError) -> str:
    """The text of an error. If the limit on open files is the cause, the text also says how to raise the limit."""
    text = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{text}: {too_low()}"
    if error.errno == errno.ENFILE:
        return f"{text}: all processes of this host together are at the limit; raise it with sysctl fs.file-max"
    return text


def too_low() -> str:
    """A text with this process's limit on open files and how to raise it."""
    soft, hard = map(_number, resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < hard:
        how = f"raise it with ulimit -n {hard}"
    else:
        how = (
            "raise it with ulimit -n as root, or with nofile in /etc/security/limits.conf, LimitNOFILE of systemd, or "
            "--ulimit nofile of a container"
        )
    return f"this process may open {soft} files; {how}"


def _number(value: int) -> int:
    return (1 << 63) - 1 if value == resource.RLIM_INFINITY else value
