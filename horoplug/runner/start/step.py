"""Starts the agents of the other nodes of a scheduler's job as a step, such as by ``srun``, with a task for each node.

Its standard input, which all tasks get, carries the job's secret and the addresses of the launcher. Each task
(step_task.py) connects to the launcher, and both prove that they know the secret. The bytes of the agent's pipes
follow as authenticated messages, which are encrypted if OpenSSL's libcrypto is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from horoplug.base import threads
from horoplug.base.errors import ProtocolError
from horoplug.rendezvous.bootstrap import slurm
from horoplug.rendezvous.network.auth import Encryption
from horoplug.rendezvous.network.libcrypto import libcrypto
from horoplug.rendezvous.network.listener import Listener, bind
from horoplug.rendezvous.network.messages import MessageStream
from horoplug.runner.agent.links import PipeLink
from horoplug.runner.ending.blame import describe
from horoplug.runner.hosts.hosts import Placement
from horoplug.runner.terms import Terms

from . import step_task
from .starters import AgentStarter, source
from .step_command import StepCommand

_LAST_MESSAGES_SECONDS = 1.0  # for the messages of tasks to arrive after srun has failed
_LAST_LINE_SECONDS = 0.3
_STEP_END_SECONDS = 3.0  # for srun to end after Slurm has ended its tasks, on a busy machine
_SIGNAL_SECONDS = 5.0  # limit for srun to end after SIGTERM
_MAX_STDERR = 1 << 13  # last bytes of srun's stderr that are kept

# Runs the scheduler's program so that it ends with the launcher, even before the tasks run. Arguments: the launcher's
# pid, the command.
_STARTER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "  # PR_SET_PDEATHSIG, SIGTERM
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def can_encrypt() -> bool:
    """Whether this host has a libcrypto."""
    try:
        libcrypto()
    except ValueError:
        return False
    return True


class NodeLink(PipeLink):
    """The connection to the agent of one node, which its task makes. Until then, bytes for the agent wait."""

    def __init__(self, source: bytes, lock: threading.RLock, step: Step) -> None:
        """``source`` and ``lock`` are those of :class:`horoplug.runner.agent.links.PipeLink`."""
        super().__init__(source, lock)
        self.name = step.name
        near, self._far = socket.socketpair()
        near.setblocking(False)
        self.stdin = os.fdopen(os.dup(near.fileno()), "wb", 0)
        self.stdout = os.fdopen(near.detach(), "rb", 0)
        self._step = step
        self._why = b""
        self._code = 1
        self._sock: socket.socket | None = None
        self.attached = False
        self.over = threading.Event()
        """Set when nothing more arrives."""

    def start(self) -> None:
        """Let bytes be sent."""
        self.started = True
        self.flush()

    def serve(self, stream: MessageStream) -> None:
        """Exchange bytes with the node's task until its end. Runs in a thread of its own."""
        self.attached, self._sock = True, stream.sock
        try:
            threads.start(self._send_all, stream)
        except OSError as error:
            self.fail(str(error.strerror))
            return
        try:
            while True:
                message = stream.receive(step_task.MAX_MESSAGE)
                if message[:1] == step_task.ENDED:
                    self._code = step_task.CODE.unpack(message[1:])[0]
                    break
                self._far.sendall(message[1:])
        except ProtocolError as error:  # among them messages that were changed
            self._why = str(error).encode()
        except OSError:
            self._why = self._why or self._step.why_task_ended().encode()
        finally:
            self.fail("")

    def _send_all(self, stream: MessageStream) -> None:
        with contextlib.suppress(OSError):
            while data := self._far.recv(step_task.CHUNK):
                stream.send(step_task.DATA, data)
            stream.sock.shutdown(socket.SHUT_WR)  # the agent ends all processes

    def fail(self, why: str) -> None:
        """End the connection, unless it is over already. ``why``: if it was lost."""
        if self.over.is_set():
            return
        self._why = self._why or why.encode()
        self.over.set()
        for sock in (self._far, self._sock):
            with contextlib.suppress(OSError):
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)

    def read_stderr(self) -> bytes:
        """Why the connection was lost, once."""
        why, self._why = self._why, b""
        return why if self.over.is_set() else b""

    def wait(self, seconds: float) -> int:
        """Wait until the agent has ended; the connection ends when ``seconds`` have passed. Returns the exit code of
        the agent's guard; 1 if the connection was lost."""
        if self.attached:
            self.over.wait(seconds)
        self.fail("")
        return self._code


class Step(AgentStarter):
    """The step that runs the agents, and the listener that their tasks connect to."""

    ends_as_one = True

    def __init__(
        self, command: StepCommand, secret: bytes, addresses: Sequence[str], terms: Terms
    ) -> None:
        """``addresses``: of this host, at one of which each node reaches it."""
        self.name = command.name
        self._command = command
        self._terms = terms
        self._secret = secret
        self._encrypts = can_encrypt()
        self._links: dict[str, NodeLink] = {}  # by the scheduler's name of the node
        self._sockets: list[socket.socket] = []
        for address in addresses:
            with contextlib.suppress(OSError):  # the address has just vanished
                self._sockets.append(bind(address))
        self._listener: Listener | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr = bytearray()  # its end
        self._is_over = threading.Event()  # srun has ended

    def link(self, host: Placement, lock: threading.RLock) -> NodeLink:
        """Add a node, by the scheduler's name, to the step."""
        link = self._links[host.name] = NodeLink(source(), lock, self)
        return link

    def start(self) -> None:
        """Run the scheduler's program on all nodes that were added, unless it runs already."""
        if self._process is not None:
            return
        self._listener = Listener(
            *(self._sockets, self._secret, step_task.CONTEXT),
            Encryption.ON if self._encrypts else Encryption.OFF,
            *(len(self._links), self._serve),
        )
        starter = [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid())]
        self._process = subprocess.Popen(
            starter + self._command.command(list(self._links), step_task.__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._command.environment(),
            start_new_session=True,  # the launcher handles the terminal's Ctrl-C
        )
        told = {
            "secret": self._secret.hex(),
            "addresses": [sock.getsockname()[:2] for sock in self._sockets],
            "encrypt": self._encrypts,
            "node_variable": self._command.node_variable,
            "by_ssh": self._terms.ssh,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(told).encode() + b"\n")  # less than a pipe holds
        self._reader.start()
        self._watcher.start()

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _serve(self, stream: MessageStream) -> None:
        link = self._links.get(stream.receive(step_task.MAX_MESSAGE).decode(errors="replace"))
        if link is not None and not link.attached:
            link.serve(stream)

    def _watch(self) -> None:
        """End the links when srun has ended."""
        assert self._process is not None
        code = self._process.wait()
        self._is_over.set()
        self._reader.join(_LAST_MESSAGES_SECONDS)
        for link in self._links.values():
            if not link.attached:
                link.fail(why_ended(self._said(), code, self.name, self._terms))
            elif code != 0:
                link.over.wait(_LAST_MESSAGES_SECONDS)
                link.fail(self._cancelled() or f"{self.name} {describe(code)}")

    def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        reported: set[str] = set()
        while data := os.read(self._process.stderr.fileno(), 1 << 16):
            self._stderr += data
            del self._stderr[:-_MAX_STDERR]
            # srun itself lasts until the end of all other tasks.
            for line in set(self._said()) - reported:
                if found := self._command.task_ended.match(line):
                    reported.add(line)
                    # A moment later, because the task's own last line may follow.
                    timer = threading.Timer(_LAST_LINE_SECONDS, self._fail_nodes, [found[1]])
                    timer.daemon = True
                    timer.start()

    def _fail_nodes(self, nodes: str) -> None:
        """End the links to nodes, in Slurm's notation, whose task has ended before it has connected."""
        with contextlib.suppress(ValueError):
            for node in slurm.hosts(nodes):
                link = self._links.get(node)
                if link is not None and not link.attached:
                    link.fail(why_ended(self._said(), 1, self.name, self._terms))

    def _said(self) -> list[str]:
        return self._stderr.decode(errors="replace").splitlines()

    def why_task_ended(self) -> str:
        """Why a task has broken its connection: the end of srun, which ends the tasks, or of the step."""
        assert self._process is not None
        self._is_over.wait(_STEP_END_SECONDS)
        if cancelled := self._cancelled():
            return cancelled  # Slurm may also have killed srun
        if (self._process.returncode or 0) < 0:
            return f"{self.name} {describe(self._process.returncode)}"
        return f"{self.name}'s task there has ended"

    def _cancelled(self) -> str:
        """The last line that says that Slurm has cancelled the step; empty if none does."""
        cancelled = [line.strip() for line in self._said() if self._command.cancelled in line]
        return cancelled[-1] if cancelled else ""

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end(self, seconds: float) -> None:
        """Stop listening, and wait until srun has ended. ``seconds``: limit before srun is ended by signals, if all
        tasks have connected; otherwise it is ended at once."""
        if self._listener is not None:
            self._listener.stop()
        if self._process is None:
            return
        connected = all(link.attached for link in self._links.values())
        for number, limit in (
            (signal.SIGTERM, seconds if connected else 0.0),
            (signal.SIGKILL, _SIGNAL_SECONDS),
        ):
            try:
                self._process.wait(limit)
            except subprocess.TimeoutExpired:
                self._process.send_signal(number)
        self._watcher.join(_SIGNAL_SECONDS)


def why_ended(said: Sequence[str], code: int, program: str, terms: Terms) -> str:
    """Why a task has not connected, from what the scheduler's program and the tasks have printed: the last line of a
    task, else of the program.

    ``code``: the program's return code."""
    lines = [line.strip() for line in said if line.strip()]
    of_tasks = [line for line in lines if not line.startswith(f"{program}:")]
    if any("No module named" in line and "horoplug" in line for line in of_tasks):
        return f"horoplug is not installed for the Python there, or is older ({of_tasks[-1]})"
    if of_tasks:
        return of_tasks[-1]
    last = lines[-1] if lines else f"{program} {describe(code)}"
    return f"{last} ({terms.ssh} starts the agents by ssh)"
