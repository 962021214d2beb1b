"""``horoplug.run``: a function on several processes, from a program or a notebook.

A launcher in a process of its own (run_launcher.py) does the work; it is ``horovodrun`` with the flags that correspond
to the arguments. This module pickles the function, relays the ranks' output and unpickles the results."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .forwarding import NAMED, exportable, split
from .run_task import Failure, pack

_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[2])
# The program removes the current folder from sys.path: a user's module there could shadow a standard module.
_LAUNCHER = """import sys
sys.path[:] = filter(None, sys.path)
from horoplug.runner.run_launcher import main
sys.exit(main(sys.argv[1:]))"""
_END_SECONDS = 30.0  # limit for the launcher to end after SIGTERM
# Arguments of Horovod for elastic jobs.
_ELASTIC = (
    *("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range"),
    *("host_discovery_script", "min_np", "max_np"),
)


class RankError(RuntimeError):
    """The function of :func:`run` did not return on every rank.

    ``rank``: the rank that failed first, None if no rank failed; ``traceback``: the text of its exception's traceback,
    empty without an exception. If the exception could be pickled, it is the ``__cause__``."""

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.rank, self.traceback)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | os.PathLike[str] | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` processes at once, and return the results by rank.

    The function may be defined in a notebook cell. The output of the ranks appears in ``sys.stdout`` and ``sys.stderr``
    while they run, with the rank before each line. ``executable``: the ranks' Python, of the same version as this one;
    ``env``: environment variables to use instead of this process's own; ranks on other hosts get those that it changes,
    and otherwise those that ``horovodrun`` forwards. The other arguments are flags of
    ``horovodrun``. ``np`` is the former name of ``num_proc``.

    Errors: RankError if the function raises an exception on a rank, if a rank ends otherwise, or if a result cannot be
    pickled; ValueError with a one-line message for invalid arguments; NotImplementedError for arguments of elastic
    jobs; KeyboardInterrupt, after all ranks have ended."""
    given = dict(locals())
    for name in _ELASTIC:
        if given[name] is not None:
            raise NotImplementedError(
                f"horoplug.run: {name} is for elastic jobs, which are not available yet"
            )
    if not callable(func):
        raise TypeError(f"horoplug.run wants a function, not {func!r}")
    if use_gloo and use_mpi:
        raise ValueError("horoplug.run: use_gloo or use_mpi, not both")
    if np is not None:
        warnings.warn("np is called num_proc now", DeprecationWarning, stacklevel=2)
    size = next(number for number in (num_proc, np, 1) if number is not None)
    interfaces = network_interface or network_interfaces
    if interfaces is not None and not isinstance(interfaces, str):
        interfaces = ",".join(interfaces)
    flags = _flags(
        {
            "-np": size,
            "--hosts": hosts,
            "--hostfile": hostfile,
            "--start-timeout": start_timeout,
            "--ssh-port": ssh_port,
            "--ssh-identity-file": ssh_identity_file,
            "--disable-cache": disable_cache,
            "--output-filename": output_filename,
            "--verbose": verbose,
            "--network-interfaces": interfaces,
            "--mpi": use_mpi,
            "--mpi-args": mpi_args,
            "--prefix-output-with-timestamp": prefix_output_with_timestamp,
        }
    )
    command = [executable or sys.executable, "-m", "horoplug.runner.run_task"]
    outer = dict(os.environ if env is None else env)
    if changed := exportable({n: v for n, v in outer.items() if os.environ.get(n) != v}):
        outer[NAMED] = ",".join([*changed, *split([outer.get(NAMED, "")])])
    with contextlib.ExitStack() as stack:
        function = stack.enter_context(tempfile.TemporaryFile())
        function.write(pack(func, tuple(args), dict(kwargs or {})))
        function.flush()
        results = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        outcome = _launch([*flags, *command], _python_path(outer), function, results)
        return _results(outcome, results)


def _flags(values: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in values.items():
        if value is True or (name == "--verbose" and value):
            flags.append(name)
        elif value is not None and value is not False and name != "--verbose":
            flags += [name, os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
    return flags


def _python_path(env: dict[str, str]) -> dict[str, str]:
    """The environment, with this package on PYTHONPATH unless it is installed."""
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = os.path.basename(_PACKAGE_FOLDER) in ("site-packages", "dist-packages")
    if installed or _PACKAGE_FOLDER in paths:
        return env
    return env | {"PYTHONPATH": os.pathsep.join([_PACKAGE_FOLDER, *paths])}


# ---- the launcher ----------------------------------------------------------------------------------------------------


def _launch(
    flags: list[str], env: dict[str, str], function: IO[bytes], results: Sequence[IO[bytes]]
) -> dict[str, Any]:
    """Run the launcher, relay its output, and return the job's outcome (see run_launcher.main)."""
    pipe_in, pipe_out = os.pipe()
    with open(pipe_in, "rb") as pipe:
        try:
            passed = [pipe_out, function.fileno(), *(result.fileno() for result in results)]
            listed = ",".join(map(str, passed))
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _LAUNCHER,
                    str(os.getpid()),
                    listed,
                    *flags,
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=passed,
                start_new_session=True,  # the terminal's Ctrl-C is handled here
            )
        finally:
            os.close(pipe_out)
        with _ending(process):
            interrupted = _relay(process)
            answer = pipe.read()
    if interrupted:
        raise KeyboardInterrupt
    if not answer:
        raise RankError(f"the launcher ended with code {process.returncode}; all ranks were ended")
    outcome: dict[str, Any] = json.loads(answer)
    return outcome


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ensure that the launcher and its ranks have ended when the ``with`` block ends, however it ends."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGTERM)
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # the launcher's agents notice its end and kill the ranks
            process.wait()


def _relay(process: subprocess.Popen[bytes]) -> bool:
    """Relay output until the launcher has closed it. Returns whether Ctrl-C was pressed."""
    interrupted = False
    with selectors.DefaultSelector() as selector:
        for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            assert stream is not None
            decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
            selector.register(stream, selectors.EVENT_READ, (name, decode))
        while selector.get_map():
            try:
                for key, _ in selector.select():
                    name, decode = key.data
                    data = os.read(key.fd, 1 << 16)
                    _print(getattr(sys, name), decode(data, final=not data))
                    if not data:
                        selector.unregister(key.fileobj)
            except KeyboardInterrupt:  # the launcher kills the ranks on a second one
                interrupted = True
                process.send_signal(signal.SIGINT)
    return interrupted


def _print(stream: Any, text: str) -> None:
    """Write to a stream, which may be a notebook's."""
    if stream is None or not text:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


# ---- results ---------------------------------------------------------------------------------------------------------


def _results(outcome: dict[str, Any], files: Sequence[IO[bytes]]) -> list[Any]:
    """The results by rank. Errors: RankError, ValueError."""
    if "usage" in outcome:
        raise ValueError(f"horoplug.run: {outcome['usage']}")
    returned, raised, text = set(outcome["returned"]), outcome["raised"], outcome["text"]
    for rank, problem in outcome["problems"].items():
        raise RankError(f"rank {rank}: its result cannot be stored: {problem}", int(rank))
    match = re.match(r"rank (\d+) ", text)
    blamed = int(match[1]) if match else None
    # A rank reports its exception before other ranks can fail because of it. A rank without a report has crashed.
    if raised and (blamed is None or blamed in raised or blamed in returned):
        raise _raised(raised[0], files[raised[0]])
    if outcome["code"] != 0:
        raise RankError(text or f"the launcher ended with code {outcome['code']}", blamed)
    for rank in range(len(files)):
        if rank not in returned:
            raise RankError(f"rank {rank} ended before its function returned", rank)
    results = []
    for rank, file in enumerate(files):
        file.seek(0)
        try:
            results.append(pickle.load(file))
        except Exception as error:
            raise RankError(
                f"rank {rank}: its result cannot be unpickled: {error}", rank
            ) from error
    return results


def _raised(rank: int, file: IO[bytes]) -> RankError:
    """The error for an exception that a rank's function has raised."""
    file.seek(0)
    failure = Failure(*pickle.load(file))
    error = RankError(f"rank {rank}: {failure.text}\n\n{failure.trace}", rank, failure.trace)
    if failure.pickled is not None:
        with contextlib.suppress(Exception):
            error.__cause__ = pickle.loads(failure.pickled)
    return error
