"""Real ranks for tests: a pool of processes in which tests start successive jobs of any size.

    def test_sum(pool):
        with pool.ranks(3) as ranks:
            assert ranks.run(lambda: hvd.allreduce(np.ones(2), op=hvd.Sum)[0]) == [3, 3, 3]

A function is pickled by value and run on all ranks at the same time. Every wait has a limit, at which the processes
print their stacks and are killed. All tests share the processes, because importing PyTorch takes a second or two.
"""

import contextlib
import dataclasses
import faulthandler
import importlib.util
import os
import pickle
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horoplug.base.numbers import FREE_THREADED
from horoplug.rendezvous.store.server import StoreServer
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.template import Template

TIMEOUT = 100.0  # seconds for a function on all ranks, unless the test says otherwise

# horoplug's own time limits, all longer than a test may take: with these, an error within TIMEOUT was caused by the
# detection of a failure and not by a time limit.
NO_LIMITS = {
    "HOROVOD_START_TIMEOUT": "600",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
    "HOROVOD_DEADLOCK_TIME_SECONDS": "0",
}


# Optimising what XLA compiles takes more time than the tests save by it.
QUICK_XLA = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def seed() -> int:
    """A seed for a randomised test, printed so that a failure can be repeated with HOROPLUG_TEST_SEED."""
    number = int(os.environ.get("HOROPLUG_TEST_SEED") or random.randrange(2**31))
    print(f"HOROPLUG_TEST_SEED={number}")
    return number


def until(condition: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Poll a condition until it is true, and return its value.

    The longer a condition takes to compute, such as one that starts a program, the less often it is polled."""
    timeout = scaled(timeout)
    deadline = time.monotonic() + timeout
    while True:
        begin = time.monotonic()
        if answer := condition():
            return answer
        end = time.monotonic()
        assert end < deadline, f"not so after {timeout:g} s"
        time.sleep(min(max(0.005, 5 * (end - begin)), 0.2))


def process_state(pid: int) -> str:
    """The state letter of a process: R runs, S sleeps, T is stopped, Z and X have ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_ended(pid: int) -> bool:
    """Whether no code of a process runs any more. Its entry in /proc can exist a little longer: with state Z until its
    parent has waited for it, and with state X while the kernel removes it."""
    try:
        return process_state(pid) in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def process_memory(pid: int | str, key: str = "VmRSS") -> int:
    """Bytes of memory that a process uses. VmHWM: the most so far, or since /proc/PID/clear_refs was written."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def resources() -> tuple[int, int, int, int]:
    """The resources of this process: descriptors, threads, mapped segments, and KiB of private memory."""
    segments = Path("/proc/self/maps").read_text().count("memfd")
    rollup = Path("/proc/self/smaps_rollup").read_text()
    private = sum(map(int, re.findall(r"Private_\w+:\s+(\d+)", rollup)))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), segments, private


def wait_until_stopped(pid: int) -> None:
    """Wait until a process has stopped itself by SIGSTOP."""
    until(lambda: process_state(pid) == "T", 60)


def _until_asleep(thread: int) -> None:
    stat, looks = Path(f"/proc/self/task/{thread}/stat"), 0
    while looks < 20:
        asleep = stat.read_text().rpartition(")")[2].split()[0] == "S"
        looks = looks + 1 if asleep else 0
        time.sleep(0.002)


@contextlib.contextmanager
def once_this_thread_waits(action: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Run an action in another thread as soon as this one waits in a call that releases the GIL.

    Nothing else releases the GIL meanwhile. Without a GIL, the thread counts as waiting when it sleeps in several looks
    of the other one."""
    before = sys.getswitchinterval()
    gate = threading.Lock()
    waiting = threading.get_native_id()

    def run() -> None:
        with gate:
            if FREE_THREADED:
                _until_asleep(waiting)
            action(*args)

    thread = threading.Thread(target=run)
    with gate:
        sys.setswitchinterval(3600)
        thread.start()  # returns when the thread waits for the GIL
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        thread.join(scaled(20))


@dataclasses.dataclass
class Outcome:
    """The outcome of a function on one rank: a value, an exception, or neither if the process died."""

    value: Any = None
    kind: str = ""  # name of the exception's class
    bases: tuple[str, ...] = ()  # names of its base classes
    message: str = ""
    trace: str = ""
    died: bool = False
    began: float = (
        0.0  # time.monotonic(), which is the same for all ranks of a machine; 0: the process died
    )
    ended: float = 0.0

    @property
    def failed(self) -> bool:
        return self.died or bool(self.kind)

    def __str__(self) -> str:
        return "the process died" if self.died else self.trace or repr(self.value)


class _Worker:
    """One process of a pool."""

    def __init__(self, template: Template, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = template.fork(theirs.fileno(), variables)
        self.connection = Connection(ours.detach())

    def send(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        with contextlib.suppress(
            OSError
        ):  # the process has died, which collecting its answer reports
            self.connection.send_bytes(cloudpickle.dumps((function, tuple(args))))

    def receive(self) -> Outcome:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.wait(scaled(10))
            return Outcome(died=True)

    def end(self) -> None:
        """Wait for the end of the process after its connection was closed; kill it after a time limit."""
        try:
            # Shutting down three frameworks can take long.
            self.process.wait(scaled(60))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGUSR1)  # it prints its stacks, see serve_requests
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(scaled(10))
            self.process.kill()
            self.process.wait(scaled(10))
            pytest.fail(f"process {self.process.pid} did not end by itself")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(scaled(10))
        self.connection.close()


class Ranks:
    """A running job. ``hvd.init()`` has been called on every rank."""

    def __init__(self, workers: list[_Worker]) -> None:
        self.workers = workers

    @property
    def size(self) -> int:
        return len(self.workers)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Run the function and return its results by rank. If any rank fails, the test fails with all tracebacks."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        if any(outcome.failed for outcome in outcomes):
            texts = [f"--- rank {r}: {o}" for r, o in enumerate(outcomes)]
            pytest.fail("\n".join(texts), pytrace=False)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
    ) -> list[Outcome]:
        """Run the function and return its outcome on each rank, including failures."""
        self.start(function, *args)
        return self.collect(timeout)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Start the function on every rank; :meth:`collect` waits for the outcomes."""
        for worker in self.workers:
            worker.send(function, args)

    def collect(self, timeout: float = TIMEOUT) -> list[Outcome]:
        timeout = scaled(timeout)
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size:
            waiting = {w.connection: r for r, w in enumerate(self.workers) if r not in outcomes}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                self._give_up(list(waiting.values()), timeout, outcomes)
            for connection in ready:
                rank = waiting[connection]
                outcomes[rank] = self.workers[rank].receive()
        return [outcomes[rank] for rank in range(self.size)]

    def until(self, condition: Callable[[], Any], timeout: float = TIMEOUT) -> None:
        """Wait for a condition that the function on the ranks makes true. If a rank ends before, the test fails with
        its outcome."""
        until(lambda: condition() or any(w.connection.poll() for w in self.workers), timeout)
        if condition():
            return
        ended = {rank: w for rank, w in enumerate(self.workers) if w.connection.poll()}
        texts = [f"--- rank {rank}: {worker.receive()}" for rank, worker in ended.items()]
        for worker in self.workers:
            worker.kill()
        pytest.fail("\n".join(["ranks ended too early", *texts]), pytrace=False)

    def collect_beside_stopped(
        self, rank: int, timeout: float = TIMEOUT
    ) -> tuple[list[Outcome], float]:
        """The outcomes on all other ranks when this one stops itself by SIGSTOP, and the seconds from then on until the
        last of them ended. Kills the stopped process."""
        stopped = self.workers[rank]
        try:
            wait_until_stopped(stopped.process.pid)
            began = time.monotonic()
            others = Ranks([worker for worker in self.workers if worker is not stopped])
            outcomes = others.collect(timeout)
            return outcomes, time.monotonic() - began
        finally:
            stopped.kill()

    def kill(self, rank: int) -> None:
        """kill -9."""
        self.workers[rank].process.send_signal(signal.SIGKILL)

    def _give_up(self, late: list[int], timeout: float, outcomes: dict[int, Outcome]) -> None:
        for rank in late:  # the processes print their stacks on stderr
            print(f"--- stacks of rank {rank} follow", file=sys.stderr, flush=True)
            self.workers[rank].process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the process is stopped
                # The signal ends the process after the stacks are printed.
                self.workers[rank].process.wait(scaled(10))
        for worker in self.workers:
            worker.kill()
        texts = [f"ranks {late} were not done after {timeout:g} s"]
        texts += [f"--- rank {rank}: {o}" for rank, o in outcomes.items() if o.failed]
        pytest.fail("\n".join(texts), pytrace=False)


class Pool:
    """Processes that run successive jobs. ``python``: their interpreter, of this one's version; ``variables``:
    additional environment variables; ``modules``: what all processes have imported when they start."""

    def __init__(
        self,
        python: str | Path = sys.executable,
        variables: dict[str, str] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.python = str(python)
        self.variables = variables or {}
        self.modules = modules
        self.workers: list[_Worker] = []
        self._template: Template | None = None

    @contextlib.contextmanager
    def ranks(
        self, size: int, hosts: str = "", env: dict[str, str] | None = None, init: bool = True
    ) -> Iterator[Ranks]:
        """A job of ``size`` ranks. ``hosts``: one letter for each rank; ranks with different letters share no memory.
        ``env``: variables of all ranks. ``init=False``: leave ``hvd.init()`` to the test."""
        self.workers = [
            w for w in self.workers if w.process.poll() is None and not w.connection.closed
        ]
        variables = environment() | self.variables
        if not self._template:
            self._template = Template(self.python, variables, self.modules)
        while len(self.workers) < size:
            self.workers.append(_Worker(self._template, variables))
        key = secrets.token_bytes(32)
        with StoreServer(key, "127.0.0.1", 0) as server:
            ranks = Ranks(self.workers[:size])
            for rank, worker in enumerate(ranks.workers):
                variables = {
                    "HOROVOD_RANK": str(rank),
                    "HOROVOD_SIZE": str(size),
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": server.address[0],
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.address[1]),
                    "HOROPLUG_SECRET_KEY": key.hex(),
                    **({"HOROVOD_HOSTNAME": hosts[rank]} if hosts else {}),
                    **(env or {}),
                }
                worker.send(_begin, (variables, init))
            failures = [o for o in ranks.collect() if o.failed]
            if failures:
                pytest.fail(f"init failed: {failures[0]}", pytrace=False)
            try:
                yield ranks
            finally:
                alive = [
                    w for w in ranks.workers if w.process.poll() is None and not w.connection.closed
                ]
                if alive:
                    Ranks(alive).outcomes(_finish)

    def end_workers(self) -> None:
        """End the processes. The next job starts new ones, without importing ``modules`` again."""
        workers = [w for w in self.workers if not w.connection.closed]
        for worker in workers:
            worker.connection.close()  # which ends it
        self.workers = []
        for worker in workers:
            worker.end()

    def close(self) -> None:
        """End the processes and the one that they were forked from."""
        try:
            self.end_workers()
        finally:
            if self._template:
                self._template.close()
                self._template = None


def ranks_fixture(*places: str, env: dict[str, str] | None = None) -> Any:
    """The fixture ``ranks`` of a module: a job for each string of hosts (see ``hosts`` of :meth:`Pool.ranks`)."""

    @pytest.fixture(scope="module", params=places)
    def ranks(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Ranks]:
        with pool.ranks(len(request.param), hosts=request.param, env=env) as job:
            yield job

    return ranks


def run_script(
    script: str | Path,
    *args: str,
    size: int = 1,
    timeout: float = 100,
    env: dict[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script on ``size`` ranks (1: without a launcher's variables) and return the output of each."""
    command = [sys.executable, str(script), *args]
    with contextlib.ExitStack() as stack:
        key = secrets.token_bytes(32)
        server = stack.enter_context(StoreServer(key, "127.0.0.1", 0))
        processes = []
        for rank in range(size):
            variables = environment() | (env or {})
            if size > 1:
                variables |= {
                    "HOROVOD_RANK": str(rank),
                    "HOROVOD_SIZE": str(size),
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": server.address[0],
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.address[1]),
                    "HOROPLUG_SECRET_KEY": key.hex(),
                }
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(_kill, process)
            processes.append(process)
        deadline = time.monotonic() + scaled(timeout)
        done = []
        for process in processes:
            out, err = process.communicate(timeout=max(deadline - time.monotonic(), 1))
            done.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return done


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(scaled(10))
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def _is_setting(name: str) -> bool:
    """Whether a variable is one of horoplug's, but for that of make test-without-direct-calls."""
    return ("HOROVOD_" in name or "HOROPLUG_" in name) and name != "HOROPLUG_DIRECT_CALLS"


def environment() -> dict[str, str]:
    """This process's environment, without variables that would make it a rank."""
    kept = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread for each rank, since the ranks share the machine's cores.
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def imported_example(path: str) -> Any:
    """A program of the folder examples, as a module."""
    file = ROOT / "examples" / path
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# ---- in the workers -------------------------------------------------------------------------------------------------


def _begin(variables: dict[str, str], init: bool) -> None:
    import horoplug as hvd

    hvd.shutdown()
    for name in filter(_is_setting, list(os.environ)):
        del os.environ[name]
    os.environ.update(variables)
    if init:
        hvd.init()


def _finish() -> None:
    import horoplug as hvd

    hvd.shutdown()


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    began = time.monotonic()
    try:
        outcome = Outcome(value=function(*args))
    except BaseException as error:
        kind = type(error)
        bases = tuple(base.__name__ for base in kind.__mro__)
        outcome = Outcome(None, kind.__name__, bases, str(error), traceback.format_exc())
    outcome.began, outcome.ended = began, time.monotonic()
    return outcome


# The descriptor at which the tests notice that this process has died. A process that this one forks has it, too.
connection_to_tests = -1


def serve_requests(fd: int) -> None:
    """Run functions that arrive on a connection, until it is closed."""
    faulthandler.enable()
    # With chain=True the signal's default action, which ends the process, follows the stacks.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    global connection_to_tests
    connection_to_tests = fd
    connection = Connection(fd)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(request)
        except BaseException:
            connection.send_bytes(
                cloudpickle.dumps(Outcome(kind="Unpickling", trace=traceback.format_exc()))
            )
            continue
        connection.send_bytes(cloudpickle.dumps(_outcome(function, args)))
