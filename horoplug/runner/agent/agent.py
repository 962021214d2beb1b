"""The process that owns all ranks of one host, so that neither they nor anything they start outlives the job.

The agent is the *subreaper* of its descendants: processes that a rank leaves behind (a shell's children, daemons)
become children of the agent instead of init, so that a walk over /proc finds them. The agent ends all processes when it
is told to, when all ranks have ended, and when the launcher is gone: its standard input ends or, on another host, the
launcher is silent for too long.

The agent is a child of a *guard* (:func:`guarded`), a subreaper that only waits for the agent. If the agent is killed,
the kernel kills the ranks (PR_SET_PDEATHSIG), and the guard kills the processes that they leave. The guard does not
need the launcher for that, so that nothing survives if launcher and agent are killed together. If the guard is killed,
the agent ends the job. If both are killed, the launcher, which is a subreaper as well, kills what is left.

The launcher sends frames on stdin (kind, length u32, payload):

    J  job, as JSON             C  probe of the network, as JSON         M  bytes for the probe's stdin; none: kill it
    T  end all ranks: SIGTERM, and SIGKILL after the grace period        K  kill all ranks at once
    B  ping: launcher is alive  Z  the launcher is about to be suspended: do not expect pings
    W  do not read the ranks' output for now                             G  read the ranks' output again
    X  kill one rank: number i32                                         F  end when all ranks have ended
    O  open a tunnel: number and command, as JSON                        Q  kill a tunnel: number i32
    I  for a tunnel's stdin: number i32, bytes; no bytes: its end        S  the same for a rank's stdin

The description of an elastic job says "keep": the agent then stays when its ranks have ended, takes further ranks in
further J frames, kills what a rank leaves behind in its session when the rank ends, and ends after F.

A tunnel is an ssh process to the agent of a further host (spawn_tree.py), with numbers from FIRST_TUNNEL downwards. The
launcher writes its stdin and reads its output through this agent, as if it had started ssh itself.

The agent first writes GREETING to stdout (a login shell may have printed something before), then frames (kind,
rank i32, length u32, payload); the probe counts as rank -1, a tunnel as the rank of its number:

    P  pid                      1 2  output on stdout, stderr            X  ended: return code i32, negative: a signal
    A  pong: answers B          E  could not be started: text            D  all processes have ended
    C  bytes of S that were written to the rank's stdin: number u32

A rank's stdin is empty, unless the job gives its ranks a program to read ("program"), or names a rank that reads what
the launcher reads ("reader").

The agent is this file and the few modules that it imports, which use only the standard library: it is run by path
(``python -I -S agent.py``) or, on another host, from standard input (agent/source.py)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

if __name__ == "__main__" and sys.argv[0] != "-c":
    # Run by path, and isolated: only this package is added, behind the standard library.
    root = os.path.abspath(__file__)
    for _ in range(4):
        root = os.path.dirname(root)
    sys.path.append(root)

from horoplug.base import thread_share
from horoplug.base.processes import (
    become_subreaper,
    descendants,
    ends_with,
    kill_descendants,
    reap,
    signal_all,
    signal_on_loss,
)
from horoplug.runner.agent.inputs import Inputs

COMMAND = struct.Struct("!cI")  # header of a frame to the agent
FRAME = struct.Struct("!ciI")  # header of a frame from the agent
GREETING = b"\nhoroplug agent 1\n"
# Kinds of frames to the agent.
START, PROBE, PROBE_INPUT = b"J", b"C", b"M"
TERMINATE, KILL = b"T", b"K"
PING, SUSPENDED = b"B", b"Z"
HOLD, CONTINUE = b"W", b"G"
KILL_RANK, FINISH = b"X", b"F"
TUNNEL, TUNNEL_INPUT, TUNNEL_KILL = b"O", b"I", b"Q"
RANK_INPUT = b"S"
# Kinds of frames from the agent.
PID, STDOUT, STDERR, ENDED = b"P", b"1", b"2", b"X"
PONG, NOT_STARTED, DONE = b"A", b"E", b"D"
TAKEN = b"C"
CHECK = -1  # the probe's number, in place of a rank
FIRST_TUNNEL = -2  # the highest number of a tunnel, in place of a rank
NUMBER = struct.Struct("!i")
COUNT = struct.Struct("!I")

_CHUNK = 1 << 16
_HIGH_WATER = 1 << 20  # bytes of unsent output beyond which the ranks' pipes are not read
_KILL_SECONDS = 10.0  # limit for a killed process to disappear
_TUNNEL_SECONDS = 2.0  # limit for further hosts to end their processes once the launcher is gone
# Limit for silence of a launcher on another host, until the launcher sets the limit.
_FIRST_SILENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02  # between searches for descendants that are not children
# Some programs loop over all possible descriptors, for example to close them.
_MOST_DESCRIPTORS = 1 << 20


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files, which the ranks inherit, to the hard limit, up to about a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def severity(code: int) -> int:
    """Sort key for the return codes of ranks that end at the same moment: crashes sort first, then errors. The first
    one is the likely cause of the others."""
    if code < 0 and code != -signal.SIGTERM:
        return 0
    if code > 128 and code != 128 + signal.SIGTERM:
        return 1  # how a shell reports a signal
    return 2 if code else 3


class Relay:
    """Sends frames to the launcher, among them what processes print.

    The processes' pipes are not read while the launcher is slower than the processes, or asks for it."""

    def __init__(self, selector: selectors.BaseSelector, fd: int) -> None:
        """``selector``: gets the descriptors to wait for; ``fd``: where the frames are written, nonblocking."""
        self._selector = selector
        self._fd = fd
        self._outbox = bytearray(GREETING)
        self._pipes: dict[int, tuple[int, bytes, IO[bytes]]] = {}  # by descriptor: rank, kind
        self._held = False  # the launcher's own output waits
        self._full = False  # too much is unsent
        self._closed = False

    @property
    def is_empty(self) -> bool:
        """Whether all frames are written."""
        return not self._outbox

    def send(self, kind: bytes, rank: int, payload: bytes = b"") -> None:
        """Queue a frame until :meth:`flush`."""
        if not self._closed:
            self._outbox += FRAME.pack(kind, rank, len(payload)) + payload

    def add(self, rank: int, stream: IO[bytes], kind: bytes) -> None:
        """Relay what arrives at ``stream``, as frames of this kind, until it ends."""
        os.set_blocking(stream.fileno(), False)
        self._pipes[stream.fileno()] = rank, kind, stream
        self._select(stream.fileno(), rank)

    def _select(self, fd: int, rank: int) -> None:
        """Let the selector wait for a pipe, or not for now. What arrives through tunnels is not held, because it is
        not only output; their agents hold the output of ranks themselves."""
        wanted = not self._full and not (self._held and rank > FIRST_TUNNEL)
        if wanted != (fd in self._selector.get_map()):
            if wanted:
                self._selector.register(fd, selectors.EVENT_READ)
            else:
                self._selector.unregister(fd)

    def hold(self, held: bool) -> None:
        """Do not read the ranks' pipes for now, or read them again."""
        self._held = held
        self._select_all()

    def _select_all(self) -> None:
        for fd, (rank, _, _) in self._pipes.items():
            self._select(fd, rank)

    def read(self, fd: int) -> bool:
        """Relay what can be read from a descriptor, if it is a pipe. Returns False if there is nothing more for now."""
        if fd not in self._pipes:
            return False
        rank, kind, stream = self._pipes[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.send(kind, rank, data)
            return True
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        del self._pipes[fd]
        stream.close()
        return False

    def drain(self, of: int | None = None) -> None:
        """Relay what is left in the pipes of dead processes. ``of``: only those of this rank."""
        for fd in [fd for fd, (rank, _, _) in self._pipes.items() if of in (None, rank)]:
            while self.read(fd):
                pass

    def flush(self) -> bool:
        """Write as much as possible. Returns False if the launcher does not read any more."""
        connected = True
        try:
            while self._outbox:
                del self._outbox[: os.write(self._fd, self._outbox[:_HIGH_WATER])]
        except BlockingIOError:
            pass
        except OSError:
            connected = False
            self.close()
        waiting = bool(self._outbox)
        if waiting != (self._fd in self._selector.get_map()):
            if waiting:
                self._selector.register(self._fd, selectors.EVENT_WRITE)
            else:
                self._selector.unregister(self._fd)
        if self._full != (len(self._outbox) > _HIGH_WATER):
            self._full = not self._full
            self._select_all()
        return connected

    def close(self) -> None:
        """Drop all frames from now on."""
        self._closed = True
        self._outbox.clear()


class Agent:
    """Runs the ranks of one host, from start to end."""

    def __init__(self, silence: float | None, guard: int) -> None:
        """``silence``: seconds without a frame after which the launcher counts as gone, until it sets another limit;
        None: never. ``guard``: the pid of the parent process."""
        self._guard = guard
        self._selector = selectors.DefaultSelector()
        self._inbox = bytearray()
        self._begun = False  # whether there has been a job
        self._keep = False  # further ranks may be started
        self._silence = silence
        self._heard = time.monotonic()
        self._check: subprocess.Popen[bytes] | None = None
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pid: rank
        self._relay = Relay(self._selector, 1)
        self._tunnels: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}  # by pid: number
        self._inputs = Inputs(self._selector, self._report_taken)  # of ranks and tunnels
        self._launcher_gone = False
        self._grace = 5.0
        self._kill_at: float | None = None
        self._give_up_at = self._kill_tunnels_at = math.inf
        self._ranks_over = False  # no rank or process of a rank is left, only tunnels
        self._woken_in, self._woken_out = socket.socketpair()

    def run(self) -> int:
        """Run the agent; returns its exit code."""
        signal_on_loss(signal.SIGTERM)
        become_subreaper()
        for sock in (self._woken_in, self._woken_out):
            sock.setblocking(False)
        # Only SIGTERM and SIGCHLD have an effect: they wake the loop. The launcher handles the others. They get an
        # empty handler instead of SIG_IGN, which the ranks would inherit.
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._woken_out.fileno(), warn_on_full_buffer=False)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(self._woken_in, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        if os.getppid() != self._guard:
            self._end(0.0)  # the guard died before PR_SET_PDEATHSIG
        try:
            self._flush()
            while not self._is_finished():
                self._run_once()
        finally:
            kill_descendants()
        self._relay.drain()
        self._relay.send(DONE, CHECK)
        self._flush()
        while not self._relay.is_empty and not self._launcher_gone:
            self._run_once()
        return 0

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _start(self, job: dict[str, Any]) -> None:
        self._begun = True
        self._grace = float(job["grace"])
        self._keep = bool(job.get("keep"))
        if not self._keep:
            self._kill_rank(CHECK)
        if self._kill_at is not None:
            return  # told to end before the job began
        command = [_bytes(part) for part in job["command"]]
        common = _environment(job)
        for entry in job["ranks"]:
            rank = int(entry["rank"])
            env = common | _variables(entry["env"])
            thread_share.give(env)
            with _stdin(job, rank) as stdin:
                process = self._popen(rank, command, env, _bytes(job["cwd"]), stdin)
            if process is None:
                if self._keep:
                    continue
                self._terminate(0.0)
                return
            if process.stdin is not None:
                self._inputs.add(rank, process.stdin)
            self._running[process.pid] = rank, process
            self._relay.send(PID, rank, struct.pack("!i", process.pid))

    def _report_taken(self, rank: int, count: int) -> None:
        if rank > FIRST_TUNNEL:
            self._relay.send(TAKEN, rank, COUNT.pack(count))

    def _open_tunnel(self, tunnel: dict[str, Any]) -> None:
        number, command = int(tunnel["number"]), [_bytes(part) for part in tunnel["command"]]
        process = self._popen(number, command, dict(os.environ), b".", subprocess.PIPE)
        if process is not None:
            assert process.stdin is not None
            self._inputs.add(number, process.stdin)
            self._tunnels[process.pid] = number, process

    def _kill_tunnels(self, number: int | None = None) -> None:
        """Kill the ssh process of one tunnel, or of all."""
        signal_all(
            [pid for pid, (each, _) in self._tunnels.items() if number in (None, each)],
            signal.SIGKILL,
        )

    def _start_check(self, check: dict[str, Any]) -> None:
        command = [_bytes(part) for part in check["command"]]
        pipe, cwd = subprocess.PIPE, _bytes(check["cwd"])
        self._check = self._popen(CHECK, command, _environment(check), cwd, pipe)
        if self._check is not None:
            self._running[self._check.pid] = CHECK, self._check

    def _popen(
        self, rank: int, command: list[bytes], env: dict[str, str], cwd: bytes, stdin: int
    ) -> subprocess.Popen[bytes] | None:
        """Start a process whose output is relayed. Returns None, and reports the error, if it cannot be started."""
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=cwd,
                env=env,
                start_new_session=True,
                preexec_fn=ends_with(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if not os.path.isdir(cwd):
                reason = f"there is no folder {os.fsdecode(cwd)}"
            self._relay.send(NOT_STARTED, rank, reason.encode())
            return None
        for stream, kind in ((process.stdout, STDOUT), (process.stderr, STDERR)):
            assert stream is not None
            self._relay.add(rank, stream, kind)
        return process

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._timeout()):
            if key.fileobj is self._woken_in:
                self._on_signal()
            elif key.fd == 0:
                self._on_command()
            elif not self._inputs.flush(key.fd):
                self._relay.read(key.fd)
        self._collect()
        self._flush()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            signal_all(self._processes(), signal.SIGKILL)
        if now >= self._kill_tunnels_at:
            self._kill_tunnels()
        if self._silence is not None and now > self._heard + self._silence:
            self._lose_launcher()

    def _is_finished(self) -> bool:
        """Whether all ranks, and the processes that they left behind, have ended. If only the latter are left, they get
        SIGTERM."""
        now = time.monotonic()
        if self._kill_at is None or now <= self._kill_at + _KILL_SECONDS:
            if self._running or (self._kill_at is None and (self._keep or not self._begun)):
                return False
            if self._processes():
                self._terminate(self._grace)
                return False
        self._ranks_over = True
        return not self._tunnels or now > self._give_up_at

    def _processes(self) -> list[int]:
        """The pids of the ranks, the probe and all processes that they have started."""
        return [] if self._ranks_over else descendants(os.getpid(), self._tunnels)

    def _timeout(self) -> float | None:
        """Seconds until the next deadline; None without one."""
        now, due = time.monotonic(), []
        if self._ranks_over:
            pass
        elif self._kill_at is not None:
            # Without a running rank, the processes that are left may not be children of the agent. Their end then sends
            # no SIGCHLD, so poll.
            due.append(max(self._kill_at - now, _POLL_SECONDS) if self._running else _POLL_SECONDS)
        if self._ranks_over and self._give_up_at < math.inf:
            due.append(_POLL_SECONDS)
        if self._silence is not None and self._heard < math.inf:
            due.append(max(self._heard + self._silence - now, 0) + _POLL_SECONDS)
        return min(due, default=None)

    def _on_signal(self) -> None:
        if signal.SIGTERM in self._woken_in.recv(4096):
            self._end(self._grace)

    def _on_command(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._lose_launcher()
        self._heard = time.monotonic()
        self._inbox += data
        while len(self._inbox) >= COMMAND.size:
            kind, length = COMMAND.unpack_from(self._inbox)
            end = COMMAND.size + length
            if len(self._inbox) < end:
                return
            payload = bytes(self._inbox[COMMAND.size : end])
            del self._inbox[:end]
            self._command(kind, payload)

    def _command(self, kind: bytes, payload: bytes) -> None:
        if kind == TERMINATE:
            self._end(self._grace)
        elif kind == KILL:
            self._end(0.0)
        elif kind == PING:
            self._relay.send(PONG, CHECK)
        elif kind == SUSPENDED:
            self._heard = math.inf
        elif kind in (HOLD, CONTINUE):
            self._relay.hold(kind == HOLD)
        elif kind == KILL_RANK:
            self._kill_rank(*NUMBER.unpack(payload))
        elif kind == FINISH:
            self._begun, self._keep = True, False
            self._kill_rank(CHECK)
        elif kind == PROBE_INPUT and not payload:
            self._kill_rank(CHECK)
        elif kind == PROBE_INPUT and self._check is not None and self._check.stdin is not None:
            with contextlib.suppress(OSError):  # the probe has ended; its end is reported
                self._check.stdin.write(payload)
        elif kind == TUNNEL:
            self._open_tunnel(json.loads(payload))
        elif kind in (TUNNEL_INPUT, RANK_INPUT):
            (number,) = NUMBER.unpack_from(payload)
            self._inputs.send(number, payload[NUMBER.size :])
        elif kind == TUNNEL_KILL:
            self._kill_tunnels(*NUMBER.unpack(payload))
        elif kind in (PROBE, START):
            description = json.loads(payload)
            self._silence = description["silence"]
            (self._start if kind == START else self._start_check)(description)

    def _lose_launcher(self) -> None:
        if not self._launcher_gone:
            self._launcher_gone = True
            self._selector.unregister(0)
            self._relay.close()
            # The agents of further hosts end all processes there.
            self._inputs.end()
            self._kill_tunnels_at = time.monotonic() + _TUNNEL_SECONDS
            self._end(0.0)

    def _end(self, grace: float) -> None:
        """End the ranks (:meth:`_terminate`). Tunnels that are still open ten seconds after the grace period are not
        waited for."""
        self._terminate(grace)
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace + _KILL_SECONDS)

    def _terminate(self, grace: float) -> None:
        """Send SIGTERM to the ranks and their descendants, and SIGKILL ``grace`` seconds later. A shorter period
        replaces a longer one."""
        first = self._kill_at is None
        kill_at = time.monotonic() + grace
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        if first and grace > 0:
            signal_all(self._processes(), signal.SIGTERM)

    def _kill_rank(self, rank: int) -> None:
        # Not Popen.kill(), which waits for a process that has ended: _collect() would not learn of its end.
        for pid, (each, _) in self._running.items():
            if each == rank:
                signal_all([pid], signal.SIGKILL)

    def _collect(self) -> None:
        """Report the ranks and tunnels that have ended. If several have, the likely cause comes first."""
        for pid, code in sorted(reap(), key=lambda end: severity(end[1])):
            found = self._running.pop(pid, None) or self._tunnels.pop(pid, None)
            if found is None:
                continue
            rank, process = found
            process.returncode = code  # Popen must not wait for the pid, which may be reused
            self._inputs.drop(rank)
            if self._keep and rank > FIRST_TUNNEL:
                # Nothing of this rank may hold a GPU or a port that its replacement needs.
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            if rank < 0 or self._keep:
                self._relay.drain(rank)  # report its output before its end
            self._relay.send(ENDED, rank, struct.pack("!i", code))

    def _flush(self) -> None:
        if not self._relay.flush():
            self._lose_launcher()


def _bytes(text: str) -> bytes:
    """Undo :func:`pack_text`."""
    return text.encode("latin-1")


def _environment(description: dict[str, Any]) -> dict[str, str]:
    """The environment for the processes of a description. On another host, it includes the variables of the login
    there."""
    own = dict(os.environ) if description["inherit"] else {}
    return own | _variables(description["env"])


def _variables(packed: dict[str, str]) -> dict[str, str]:
    return {os.fsdecode(_bytes(k)): os.fsdecode(_bytes(v)) for k, v in packed.items()}


@contextlib.contextmanager
def _stdin(job: dict[str, Any], rank: int) -> Iterator[int]:
    """The stdin for a rank, as :class:`subprocess.Popen` takes it."""
    program = job.get("program")
    if program is None:
        yield subprocess.PIPE if job.get("reader") == rank else subprocess.DEVNULL
        return
    # A file in memory, so that a rank may read its copy when it wants to.
    with os.fdopen(os.memfd_create("program"), "wb", 0) as file:
        file.write(_bytes(program))
        file.seek(0)
        yield file.fileno()


def pack_text(text: str) -> str:
    """Encode a path or variable for JSON: each byte becomes one character."""
    return os.fsencode(text).decode("latin-1")


def guarded(silence: float | None) -> int:
    """Run the agent as a child of this process, which kills the agent's descendants if the agent is killed.

    ``silence``: see :class:`Agent`. Returns the agent's exit code, 128 + n for signal n."""
    become_subreaper()
    raise_descriptor_limit()
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        return Agent(silence, guard).run()
    # Pass SIGTERM on to the agent: whoever terminates the guard wants to end the agent.
    signal.signal(signal.SIGTERM, lambda *_: signal_all([child], signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for fd in (0, 1):
        os.close(fd)  # only the agent may keep the pipes open
    _, status = os.waitpid(child, 0)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(guarded(_FIRST_SILENCE_SECONDS if sys.argv[0] == "-c" else None))
