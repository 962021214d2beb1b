"""The driver's end of the connections to its tasks (tasks.py): who has joined, what ranks print, and how they end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import secrets
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from horoplug.base.config import value
from horoplug.base.errors import ProtocolError
from horoplug.base.variables import SECRET_BYTES
from horoplug.rendezvous.network.auth import Encryption
from horoplug.rendezvous.network.listener import Listener, bind
from horoplug.rendezvous.network.messages import MessageStream
from horoplug.runner.functions.exchange import Exchange, ResultFiles
from horoplug.runner.functions.run_task import PORT

from .session import is_compat, unusable_address
from .tasks import CONTEXT, DONE, ENDED, HELLO, KILL, LONGEST, OUTPUT, START, Ticket

_WAITING = 256  # events; with more, tasks wait before they send more output
_JOIN_SECONDS = 60.0  # for Spark to end a job whose tasks have ended or that was cancelled


@dataclasses.dataclass(eq=False)
class Task:
    """A task that has joined."""

    partition: int
    attempt: int
    """Grows with each attempt of each task of the application."""
    tasks: int
    """The number of tasks of Spark's job; 0 if unknown."""
    host: str
    """A name that only tasks of this machine have."""
    has_rows: bool
    problem: str
    """Why the task cannot take part, in one line; empty if it can."""
    stream: MessageStream
    number: int | None = None
    """The rank or process that it runs."""

    def start(self, number: int, variables: Mapping[str, str], executable: str | None) -> None:
        """Run a rank."""
        self.number = number
        shown = {
            k: v for k, v in variables.items() if k != "_HOROVOD_SECRET_KEY"
        }  # the task has it
        start = {"number": number, "variables": shown, "executable": executable}
        self._send(START, json.dumps(start).encode())

    def kill(self) -> None:
        """End its rank: by SIGTERM, and 3 s later by SIGKILL."""
        self._send(KILL)

    def release(self) -> None:
        """Let the task end."""
        self._send(DONE)

    def _send(self, *parts: bytes) -> None:
        with contextlib.suppress(OSError):  # it is lost, which its thread reports
            self.stream.send(*parts)


@dataclasses.dataclass
class Joined:
    """A task has joined the job."""

    task: Task


@dataclasses.dataclass
class Printed:
    """A rank has printed something. ``stream``: 0 for stdout, 1 for stderr."""

    number: int
    stream: int
    data: bytes


@dataclasses.dataclass
class Ended:
    """A rank has ended. ``problem``: what has gone wrong with its task, in one line; empty if nothing has."""

    task: Task
    number: int
    code: int
    problem: str


@dataclasses.dataclass
class Lost:
    """The connection to a task has ended, and the task with it."""

    task: Task


@dataclasses.dataclass
class SparkEnded:
    """Spark's job has ended. ``error``: that of the action, None if it has succeeded."""

    error: BaseException | None


Event = Joined | Printed | Ended | Lost | SparkEnded


class TaskService:
    """Runs one job of Spark whose tasks are slots, and reports what happens in :attr:`events`. A context manager."""

    def __init__(self, context: Any, address: str, function: bytes, size: int, most: int) -> None:
        """``function``: that of :func:`horoplug.runner.functions.run_task.pack`; ``size``: the number of ranks at once;
        ``most``: ranks have lower numbers. Errors: OSError."""
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.events: queue.Queue[Event] = queue.Queue(_WAITING)
        self._context = context
        self._group = f"horoplug-{uuid.uuid4().hex}"
        self._machines: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._function = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close())
        self._function.write(function)
        self._function.flush()
        self.results = ResultFiles(tempfile.gettempdir(), size, most)
        try:
            host = _bindable(address)
            sock = bind(host)
            self.exchange = Exchange(self.secret, host, self._function.fileno(), self.results)
        except OSError as error:
            self._function.close()
            raise unusable_address(address, error) from None
        self.address = host
        self.ticket = Ticket(
            *(host, sock.getsockname()[1], self.secret), bool(value("ENCRYPT")), is_compat()
        )
        self._listener = Listener(
            [sock], self.secret, CONTEXT, Encryption.AS_CLIENT, size, self._serve
        )

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which ranks find the exchange of function and results."""
        return {PORT: str(self.exchange.port)}

    def submit(self, action: Callable[[Ticket], object], description: str) -> None:
        """Run Spark's job in a thread. ``action``: runs it; ``description``: for Spark's pages."""
        from pyspark import InheritableThread

        def run() -> None:
            error: BaseException | None = None
            try:
                self._context.setJobGroup(self._group, description, interruptOnCancel=True)
                action(self.ticket)
            except BaseException as raised:
                error = raised
            self._put(SparkEnded(error))

        self._thread = InheritableThread(target=run, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Cancel Spark's job, which would otherwise run lost tasks again."""
        with contextlib.suppress(Exception):  # Spark has ended
            self._context.cancelJobGroup(self._group)

    def close(self) -> None:
        """End all connections, and wait for the end of Spark's job."""
        self._closed.set()
        self._listener.close()
        self.exchange.close()
        self._function.close()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> TaskService:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cancel()
        self.close()

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self.events.put(event, timeout=1.0)
                return

    def _serve(self, stream: MessageStream) -> None:
        message = stream.receive(LONGEST)
        if message[:1] != HELLO:
            raise ProtocolError("a task begins with another message")
        task = self._task(json.loads(message[1:]), stream)
        self._put(Joined(task))
        try:
            while True:
                message = stream.receive(LONGEST)
                if message[:1] == OUTPUT and task.number is not None:
                    self._put(Printed(task.number, message[1], message[2:]))
                elif message[:1] == ENDED:
                    end = json.loads(message[1:])
                    task.number = None
                    self._put(Ended(task, end["number"], end["code"], end["problem"]))
        finally:
            self._put(Lost(task))

    def _task(self, hello: dict[str, Any], stream: MessageStream) -> Task:
        host = str(hello["host"])
        with self._lock:
            label = self._machines.get(hello["machine"])
            if label is None:
                taken = set(self._machines.values())
                names = (f"{host}-{number}" if number else host for number in range(len(taken) + 1))
                label = next(name for name in names if name not in taken)
                self._machines[hello["machine"]] = label
        return Task(
            hello["partition"],
            hello["attempt"],
            hello["tasks"],
            label,
            hello["has_rows"],
            hello["problem"],
            stream,
        )


def _bindable(address: str) -> str:
    """The numeric address of the driver, which the ranks get. Errors: OSError for an unknown name."""
    found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])


def executable_of(executable: str | os.PathLike[str] | None) -> str | None:
    """The Python of the ranks, None: that of Spark's workers."""
    return None if executable is None else os.fspath(executable)
