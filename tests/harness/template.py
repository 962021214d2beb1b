"""Starts the processes of pools quickly: a template process imports frameworks once and is then forked.

Importing PyTorch takes 3 s of processor time and TensorFlow 5 s. A process that is forked after the imports is ready at
once. The template itself never starts a thread or a job, so that its forks are like new processes.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from tests.harness import ROOT
from tests.harness.limits import scaled

# The repository's root replaces the working directory, because the folder tests contains a package named torch.
_PROGRAM = f"""
import sys
sys.path[0] = {str(ROOT)!r}
from tests.harness.template import _serve
_serve()
"""
_LARGEST_REQUEST = 1 << 20  # bytes of a request, which contains a process's environment


class ForkedProcess:
    """A process that a template has forked, with the part of ``subprocess.Popen``'s interface that tests use."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """None while the process runs, then 0. Only its parent, the template, could know the exit status."""
        return self._ended(0.0)

    def wait(self, timeout: float) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return 0

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float) -> int | None:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return 0 if poller.poll(1000 * timeout) else None

    def __del__(self) -> None:
        os.close(self._pidfd)


class Template:
    """A process that has imported ``modules``, except those that are not installed. ``python``: its interpreter."""

    def __init__(self, python: str, environment: dict[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid()), *modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._socket.settimeout(120)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_REQUEST)

    def fork(self, connection: int, environment: dict[str, str]) -> ForkedProcess:
        """A process with these variables that serves requests from a descriptor; see ``support.serve_requests``."""
        socket.send_fds(self._socket, [json.dumps(environment).encode()], [connection])
        answer, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        assert fds, "the template process has died"
        return ForkedProcess(int(answer), fds[0])

    def close(self) -> None:
        self._socket.close()  # which ends the process
        try:
            self._process.wait(scaled(20))
        finally:
            self._process.kill()
            self._process.wait(scaled(10))


# ---- in the template ------------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _serve() -> None:
    fd, parent, modules = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    _die_with(parent)
    del sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes forks that have ended
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    from tests.harness.support import serve_requests

    freeze_imports()
    requests = socket.socket(fileno=fd)
    requests.set_inheritable(False)
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 1)
        if not fds:
            return
        template = os.getpid()
        pid = os.fork()
        if not pid:
            requests.close()
            _become_process(template, json.loads(request))
            serve_requests(fds[0])
            return
        pidfd = os.pidfd_open(pid)
        socket.send_fds(requests, [str(pid).encode()], [pidfd])
        os.close(pidfd)
        os.close(fds[0])


def _become_process(template: int, environment: dict[str, str]) -> None:
    _die_with(template)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    renew_process(environment)


# ---- for all processes that fork ranks ------------------------------------------------------------------------------


def freeze_imports() -> None:
    """Before the forks: their collections of garbage need not visit what has been imported, nor copy its memory by
    writing to it."""
    gc.collect()
    gc.freeze()


def renew_process(environment: dict[str, str]) -> None:
    """In a fork: give it the environment and the random numbers of a new process."""
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
