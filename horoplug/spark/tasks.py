"""A task of Spark that is a slot for ranks: it runs in Spark's Python worker, and starts each rank as a child process.

A child, because Spark uses its Python workers again: what a rank leaves in its process (the state of a framework, a
CUDA context, threads, variables) would meet the next job there. Besides, a child's output can be captured as a whole,
and a child can be ended without Spark's help.

The task connects to the driver with the job's secret, which Spark ships within the pickled function of the task. All
messages begin with their kind:

    task                                   driver
    HELLO, JSON (see hello())       ->
                                    <-     START, JSON: number, variables, executable
    OUTPUT, stream 0 or 1, bytes … ->
                                    <-     KILL
    ENDED, JSON: number, code, problem ->  a further START may follow
                                    <-     DONE, or the end of the connection

A task never fails because of its rank: Spark would run it again. The driver knows what has happened."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Final, NamedTuple

from horoplug.base.errors import AuthenticationError, ProtocolError, RendezvousError
from horoplug.base.processes import ends_with
from horoplug.compat import python_path
from horoplug.rendezvous.network import dial
from horoplug.rendezvous.network.messages import MessageStream
from horoplug.rendezvous.network.topology import host_key
from horoplug.runner.environment import give_threads

from .feed import Feeder
from .task import DEVICES

CONTEXT: Final = b"spark"
HELLO, OUTPUT, ENDED = b"H", b"O", b"E"
START, KILL, DONE = b"S", b"K", b"D"
LONGEST: Final = 1 << 20  # bytes of a message's payload
_CONNECT_SECONDS = 30.0
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL
_PIECE = 1 << 16
# Variables by which Spark's Python workers and Java authenticate each other. Programs do not need them.
_OF_SPARK: Final = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_SOCK_DIR")


class Ticket(NamedTuple):
    """What a task needs to join a job. Spark ships it within the task's function, which is neither in its pages nor in
    its event log."""

    address: str
    port: int
    secret: bytes
    encrypt: bool
    compat: bool
    """Whether the ranks import horoplug under the name horovod, too."""

    def __repr__(self) -> str:
        return f"Ticket({self.address}:{self.port})"  # without the secret


def serve(ticket: Ticket, feeder: Feeder | None = None) -> None:
    """Run ranks of the job until the driver has no more need of this task. ``feeder``: gives the rank its data."""
    try:
        sock, channel = dial.connect(
            *(ticket.address, ticket.port, ticket.secret, CONTEXT, _CONNECT_SECONDS),
            f"the driver at {ticket.address}:{ticket.port}",
            ticket.encrypt,
        )
    except (AuthenticationError, RendezvousError) as error:
        raise RuntimeError(f"horoplug.spark: {error}") from None
    stream = MessageStream(sock, channel)
    with sock, contextlib.suppress(OSError, ProtocolError):  # the job is over
        stream.send(HELLO, json.dumps(hello(feeder)).encode())
        while (message := stream.receive(LONGEST))[:1] != DONE:
            if message[:1] == START:
                start = json.loads(message[1:])
                code = _run(start, ticket, stream, feeder)
                problem = "" if feeder is None else feeder.problem
                end = {"number": start["number"], "code": code, "problem": problem}
                stream.send(ENDED, json.dumps(end).encode())


def hello(feeder: Feeder | None = None) -> dict[str, Any]:
    """What the driver has to know of this task. ``machine`` is the same for tasks that share a machine and its network,
    ``tasks`` the number of tasks of the job, 0 if Spark does not tell."""
    from pyspark import BarrierTaskContext, TaskContext

    task = TaskContext.get()
    assert task is not None
    is_barrier = isinstance(task, BarrierTaskContext)
    return {
        "partition": task.partitionId(),
        "attempt": task.taskAttemptId(),
        "tasks": len(task.getTaskInfos()) if is_barrier else 0,
        "host": socket.gethostname(),
        "machine": host_key(str(os.stat("/dev/shm").st_dev)),
        "has_rows": feeder is None or feeder.has_rows(),
        "problem": "" if feeder is None else feeder.problem,
    }


# ---- the child -------------------------------------------------------------------------------------------------------


def _run(
    start: dict[str, Any], ticket: Ticket, stream: MessageStream, feeder: Feeder | None
) -> int:
    """Run a rank in a child process, and relay its output to the driver. Returns its return code, 127 if it could not
    be started. Errors: OSError if the job is over."""
    env = _environment(start["variables"], ticket)
    passed: tuple[int, ...] = ()
    if feeder is not None:
        passed = (feeder.open(env),)
    try:
        process = _popen([start["executable"] or sys.executable], env, passed)
    except OSError as error:
        text = f"{start['executable']} cannot be started: {error.strerror}\n"
        stream.send(OUTPUT, b"\x01", text.encode())
        return 127
    try:
        if feeder is not None:
            feeder.begin(lambda: _signal(process, signal.SIGKILL))
        _relay(process, stream)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has left behind
        code = process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if feeder is not None:
            feeder.close()
    return code


def _environment(variables: dict[str, str], ticket: Ticket) -> dict[str, str]:
    from pyspark import TaskContext

    env = {name: value for name, value in os.environ.items() if name not in _OF_SPARK}
    inside = (sys.prefix, sys.base_prefix)
    paths = [path for path in sys.path if path and not path.startswith(inside)]  # with --py-files
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    env |= variables
    give_threads(env)
    if ticket.compat:
        env["PYTHONPATH"] = python_path(env)
    env["_HOROVOD_SECRET_KEY"] = base64.b64encode(ticket.secret).decode()
    task = TaskContext.get()
    resources = {} if task is None else task.resources()
    env[DEVICES] = ",".join(resources["gpu"].addresses) if "gpu" in resources else ""
    return env


def _popen(
    python: list[str], env: dict[str, str], passed: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*python, "-m", "horoplug.runner.functions.run_task"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=passed,
        start_new_session=True,
        preexec_fn=ends_with(os.getpid()),  # when Spark kills the worker
    )


def _relay(process: subprocess.Popen[bytes], stream: MessageStream) -> None:
    """Relay the output of a child until it has ended. Errors: OSError if the job is over; the child may still run."""
    kill_at: float | None = None
    ended = os.pidfd_open(process.pid)
    pipes: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for number, pipe in enumerate((process.stdout, process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                pipes[pipe.fileno()] = bytes([number])
                selector.register(pipe, selectors.EVENT_READ)
            selector.register(ended, selectors.EVENT_READ)
            selector.register(stream.sock, selectors.EVENT_READ)
            while True:
                left = None if kill_at is None else max(kill_at - time.monotonic(), 0)
                ready = {key.fd: key.fileobj for key, _ in selector.select(left)}
                for fd in ready.keys() & pipes.keys():
                    if not _forward(fd, pipes[fd], stream):
                        selector.unregister(fd)
                        del pipes[fd]
                if stream.sock.fileno() in ready and stream.receive(LONGEST)[:1] == KILL:
                    kill_at = kill_at or time.monotonic() + _GRACE_SECONDS
                    _signal(process, signal.SIGTERM)
                if kill_at is not None and time.monotonic() >= kill_at:
                    _signal(process, signal.SIGKILL)
                if ended in ready:
                    break
            for (
                fd,
                number_of_stream,
            ) in pipes.items():  # processes that it has started may keep them open
                while _forward(fd, number_of_stream, stream, is_last=True):
                    pass
        finally:
            os.close(ended)


def _forward(fd: int, number: bytes, stream: MessageStream, is_last: bool = False) -> bool:
    """Forward what a pipe has. Returns whether more may follow; ``is_last``: at once."""
    try:
        data = os.read(fd, _PIECE)
    except BlockingIOError:
        return not is_last
    if data:
        stream.send(OUTPUT, number, data)
    return bool(data)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
