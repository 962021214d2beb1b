"""Processes of this host: what /proc tells of them, and how they are ended. A part of the agent: only the standard
library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Container, Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0  # limit for a killed process to disappear
_libc = ctypes.CDLL(None)


def stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` that follow the command's name: state, parent, process group, session, ...
    None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, can contain anything.
            return file.read().decode("latin-1").rpartition(")")[2].split()
    except OSError:
        return None


def signal_on_loss(number: int) -> None:
    """Have the kernel send a signal to this process when the thread of its parent that has started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans (PR_SET_CHILD_SUBREAPER)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int, without: Container[int] = ()) -> list[int]:
    """Pids of all live descendants of ``root``, without zombies. ``without``: processes that are left out, together
    with their descendants."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat(int(name))) is not None:
            children.setdefault(int(fields[1]), []).append((int(name), fields[0]))
    found, front = [], [root]
    while front:
        for pid, state in children.get(front.pop(), ()):
            if pid in without:
                continue
            front.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process. Processes that have ended are ignored."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def reap() -> list[tuple[int, int]]:
    """(pid, return code as in :mod:`subprocess`) of all children that have ended."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def kill_descendants() -> None:
    """Kill all descendants of this process and wait until they are gone, for at most 10 s."""
    deadline = time.monotonic() + _KILL_SECONDS
    while pids := descendants(os.getpid()):
        signal_all(pids, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)
        reap()
    reap()


def ends_with(parent: int) -> Callable[[], None]:
    """What a new process calls, so that the kernel kills it when the thread of its parent that has started it ends.
    ``parent``: the pid."""

    def in_child() -> None:
        signal_on_loss(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the line above

    return in_child
