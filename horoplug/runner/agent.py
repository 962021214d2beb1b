"""The process that owns all ranks of one host, so that none of them, nor anything they start, outlives the job.

It is the *subreaper* of its descendants: whatever a rank leaves behind (a shell's children, daemons) becomes its
child instead of init's, so that a walk over /proc finds it. It ends everything when it is told to, when all ranks have
ended, and when the launcher is gone, which it notices by the end of its standard input. Should the agent itself be
killed, then the ranks die with it (PR_SET_PDEATHSIG), and what they leave becomes the launcher's, which is a subreaper,
too. (Both killed at the same moment: what a rank has started itself would survive. They are in different sessions, so
that no terminal and no process group does that.)

The launcher sends on stdin: a job description (length u32, JSON), then single bytes: ``T`` ends all ranks (SIGTERM,
SIGKILL after the grace period), ``K`` kills them at once. The agent reports on stdout in frames (kind, rank i32, length
u32, payload): ``P`` pid, ``1`` / ``2`` output on stdout / stderr, ``X`` ended (return code i32, negative for a signal),
``E`` could not be started (text), ``D`` everything has ended.

This file needs only the standard library and no other file, because it is run by path: ``python -I -S agent.py``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import IO, Any

FRAME = struct.Struct("!ciI")
STDOUT, STDERR = b"1", b"2"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 1 << 16
_HIGH_WATER = 1 << 20  # unsent output beyond which the ranks have to wait
_KILL_SECONDS = 10.0  # how long a killed process may take to go away
_POLL = 0.02  # seconds between looks at descendants that are not children


_libc = ctypes.CDLL(None)


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """Pids of all live processes below ``root``, without zombies."""
    children: dict[int, list[tuple[int, str]]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command's name, in parentheses, can contain anything.
                state, parent = file.read().decode("latin-1").rpartition(")")[2].split(None, 2)[:2]
        except (OSError, ValueError):
            continue  # ended meanwhile
        children.setdefault(int(parent), []).append((int(name), state))
    found, front = [], [root]
    while front:
        for pid, state in children.get(front.pop(), ()):
            front.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each; those that have ended are passed over."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def reap() -> list[tuple[int, int]]:
    """(pid, return code) of all children that have ended, as :mod:`subprocess` counts codes."""
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
    """Kill everything below this process and wait until it is gone, within a limit."""
    deadline = time.monotonic() + _KILL_SECONDS
    while pids := descendants(os.getpid()):
        signal_all(pids, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)
        reap()
    reap()


def severity(code: int) -> int:
    """Which of several ends at the same moment is the cause: a crash before an error before the rest."""
    if code < 0 and code != -signal.SIGTERM:
        return 0
    if code > 128 and code != 128 + signal.SIGTERM:
        return 1  # a shell reports a signal like this
    return 2 if code else 3


class Agent:
    """The ranks of one host, from start to end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pid: rank
        self._pipes: dict[int, tuple[int, bytes, IO[bytes]]] = {}  # by descriptor: rank, kind
        self._outbox = bytearray()
        self._paused = False  # the launcher is slower than the ranks
        self._launcher_gone = False
        self._grace = 5.0
        self._kill_at: float | None = None
        self._woken_in, self._woken_out = socket.socketpair()

    def run(self) -> int:
        """Everything; returns the exit code of the agent."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        become_subreaper()
        job = _read_job()
        if job is None:
            return 1
        self._grace = float(job["grace"])
        for sock in (self._woken_in, self._woken_out):
            sock.setblocking(False)
        # Only SIGTERM and SIGCHLD mean something here, by waking the loop up. The others are the launcher's business;
        # they get a handler and are not ignored, since the ranks would inherit that.
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._woken_out.fileno(), warn_on_full_buffer=False)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(self._woken_in, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        try:
            self._start(job)
            self._flush()
            while not self._over():
                self._turn()
        finally:
            kill_descendants()
        self._drain()
        self._send(b"D", -1)
        self._finish_output()
        return 0

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _start(self, job: dict[str, Any]) -> None:
        command = [_bytes(part) for part in job["command"]]
        common = {_bytes(k): _bytes(v) for k, v in job["env"].items()}
        me = os.getpid()

        def in_child() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)  # the agent died before the line above

        for entry in job["ranks"]:
            rank = int(entry["rank"])
            env = common | {_bytes(k): _bytes(v) for k, v in entry["env"].items()}
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    cwd=_bytes(job["cwd"]),
                    env=env,
                    start_new_session=True,
                    preexec_fn=in_child,
                )
            except (OSError, subprocess.SubprocessError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                self._send(b"E", rank, reason.encode())
                self._terminate(0.0)
                return
            self._running[process.pid] = rank, process
            for stream, kind in ((process.stdout, STDOUT), (process.stderr, STDERR)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                self._pipes[stream.fileno()] = rank, kind, stream
                self._selector.register(stream.fileno(), selectors.EVENT_READ)
            self._send(b"P", rank, struct.pack("!i", process.pid))

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience()):
            if key.fileobj is self._woken_in:
                self._on_signal()
            elif key.fd == 0:
                self._on_command()
            elif key.fd in self._pipes:
                self._on_output(key.fd)
        self._collect()
        self._flush()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            signal_all(descendants(os.getpid()), signal.SIGKILL)

    def _over(self) -> bool:
        """Whether all ranks have ended, and all that they left behind, which is asked to end here."""
        if self._kill_at is not None and time.monotonic() > self._kill_at + _KILL_SECONDS:
            return True
        if self._running:
            return False
        if not descendants(os.getpid()):
            return True
        self._terminate(self._grace)
        return False

    def _patience(self) -> float | None:
        if self._kill_at is None:
            return None
        if not self._running:
            return _POLL  # what is left is not necessarily a child whose end would wake us
        return max(self._kill_at - time.monotonic(), _POLL)

    def _on_signal(self) -> None:
        if signal.SIGTERM in self._woken_in.recv(4096):
            self._terminate(self._grace)

    def _on_command(self) -> None:
        try:
            commands = os.read(0, 4096)
        except BlockingIOError:
            return
        if not commands:
            self._lose_launcher()
        if b"K" in commands:
            self._terminate(0.0)
        elif b"T" in commands:
            self._terminate(self._grace)

    def _lose_launcher(self) -> None:
        if not self._launcher_gone:
            self._launcher_gone = True
            self._selector.unregister(0)
            self._outbox.clear()
            self._terminate(0.0)

    def _terminate(self, grace: float) -> None:
        """SIGTERM to everyone, and SIGKILL ``grace`` seconds later; a shorter grace period replaces a longer one."""
        first = self._kill_at is None
        kill_at = time.monotonic() + grace
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if first and grace > 0:
            signal_all(descendants(os.getpid()), signal.SIGTERM)

    def _collect(self) -> None:
        """Report the ranks that have ended; of several at once, the likely cause first."""
        ended = [(severity(code), pid, code) for pid, code in reap() if pid in self._running]
        for _, pid, code in sorted(ended, key=lambda end: end[0]):
            rank, process = self._running.pop(pid)
            process.returncode = code  # it must not wait for the pid, which may be another's soon
            self._send(b"X", rank, struct.pack("!i", code))

    # ---- output ------------------------------------------------------------------------------------------------------

    def _on_output(self, fd: int) -> bool:
        """Pass on what a rank has printed; False when there is nothing more for now."""
        rank, kind, stream = self._pipes[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._send(kind, rank, data)
            return True
        if not self._paused:
            self._selector.unregister(fd)
        del self._pipes[fd]
        stream.close()
        return False

    def _send(self, kind: bytes, rank: int, payload: bytes = b"") -> None:
        if not self._launcher_gone:
            self._outbox += FRAME.pack(kind, rank, len(payload)) + payload

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(1, self._outbox[:_HIGH_WATER])]
        except BlockingIOError:
            pass
        except OSError:
            self._lose_launcher()
        waiting = bool(self._outbox)
        if waiting != (1 in self._selector.get_map()):
            if waiting:
                self._selector.register(1, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(1)
        pause = len(self._outbox) > _HIGH_WATER
        if pause != self._paused:
            self._paused = pause
            for fd in self._pipes:
                if pause:
                    self._selector.unregister(fd)
                else:
                    self._selector.register(fd, selectors.EVENT_READ)

    def _drain(self) -> None:
        """Take what is still in the pipes; their writers are dead."""
        self._paused = True  # unregistering no longer matters
        for fd in list(self._pipes):
            while fd in self._pipes and self._on_output(fd):
                pass

    def _finish_output(self) -> None:
        if self._launcher_gone:
            return
        os.set_blocking(1, True)
        with contextlib.suppress(OSError):
            while self._outbox:
                del self._outbox[: os.write(1, self._outbox[:_CHUNK])]


def _read_job() -> dict[str, Any] | None:
    """The job description; None if the launcher has gone before it was complete."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            wanted = 4 if len(data) < 4 else 4 + int.from_bytes(data[:4], "big")
            piece = stdin.read(wanted - len(data))
            if not piece:
                return None
            data += piece
    job: dict[str, Any] = json.loads(data[4:])
    return job


def _bytes(text: str) -> bytes:
    """Undo :func:`pack_text`."""
    return text.encode("latin-1")


def pack_text(text: str) -> str:
    """Bytes of the file system's or environment's encoding, each as one character, so that JSON can carry them."""
    return os.fsencode(text).decode("latin-1")


def pack_job(
    command: list[str], env: dict[str, str], ranks: dict[int, dict[str, str]], grace: float
) -> bytes:
    """The job description as it is sent: ``env`` for all ranks, and each rank's additions."""

    def packed(variables: dict[str, str]) -> dict[str, str]:
        return {pack_text(name): pack_text(value) for name, value in variables.items()}

    job = {
        "command": [pack_text(part) for part in command],
        "cwd": pack_text(os.getcwd()),
        "env": packed(env),
        "ranks": [{"rank": rank, "env": packed(own)} for rank, own in ranks.items()],
        "grace": grace,
    }
    data = json.dumps(job).encode()
    return len(data).to_bytes(4, "big") + data


if __name__ == "__main__":
    sys.exit(Agent().run())
