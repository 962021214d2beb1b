"""``horoplug.run``: a function on several processes, from a program or a notebook.

A launcher in a process of its own (run_launcher.py) does the work; it is ``horovodrun`` with the flags that correspond
to the arguments. This module pickles the function, relays the ranks' output and unpickles the results."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from horoplug.base.pickling import why_not

from .checks import UsageError, check_folder
from .ending.results import RankError as RankError
from .ending.results import Results
from .forwarding import NAMED, exportable, split
from .functions.run_task import pack

__all__ = ["RankError", "run"]

_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[2])
# The program removes the current folder from sys.path: a user's module there could shadow a standard module.
_LAUNCHER = """import sys
sys.path[:] = filter(None, sys.path)
from horoplug.runner.functions.run_launcher import main
sys.exit(main(sys.argv[1:]))"""
_Result = TypeVar("_Result")
_END_SECONDS = 30.0  # limit for the launcher to end after SIGTERM


def run(
    func: Callable[..., _Result],
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
) -> list[_Result]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` processes at once, and return the results by rank.

    The function may be defined in a notebook cell. The output of the ranks appears in ``sys.stdout`` and ``sys.stderr``
    while they run, with the rank before each line. ``executable``: the ranks' Python, of the same version as this one;
    ``env``: environment variables to use instead of this process's own; ranks on other hosts get those that it changes,
    and otherwise those that ``horovodrun`` forwards. ``np``, ``min_np`` and ``max_np`` are the former names of
    ``num_proc``, ``min_num_proc`` and ``max_num_proc``.

    The other arguments are flags of ``horovodrun``:

    hosts, hostfile: where the ranks run, such as "a:2,b:2", or a file with a host in each line; by default on this one.
    start_timeout: seconds until all ranks must have connected (30).
    network_interface, network_interfaces: the interfaces that connect hosts, by name.
    ssh_port, ssh_identity_file: for the connections to other hosts.
    output_filename: a folder, to which the output is also written.
    prefix_output_with_timestamp: print the time before every line.
    verbose: print what the launcher does.
    use_gloo, use_mpi: start the ranks without MPI (the default), or with mpirun; mpi_args: further arguments for it.
    disable_cache: accepted for compatibility with Horovod, and has no effect.

    ``min_num_proc``, ``max_num_proc`` and ``host_discovery_script`` make the job elastic: a process that fails is
    replaced, and the results are those of the last membership, by rank. ``slots`` (of each host that the script prints
    without a number), ``reset_limit`` (how often the job may be formed again) and ``cooldown_range`` (the least and the
    most seconds for which a failed host is not used) have no effect in other jobs.

    Errors: RankError if the function raises an exception on a rank, if a rank ends otherwise, or if a result cannot be
    pickled, in an elastic job only once the job has failed; TypeError if the function or an
    argument cannot be pickled; ValueError with a one-line message for invalid arguments;
    KeyboardInterrupt, after all ranks have ended.

    Example:

        def work(factor):
            import horoplug as hvd

            hvd.init()
            return hvd.rank() * factor

        horoplug.run(work, args=(10,), num_proc=2)  # -> [0, 10]
    """
    if not callable(func):
        raise TypeError(f"horoplug.run wants a function, not {func!r}")
    if use_gloo and use_mpi:
        raise ValueError("horoplug.run: use_gloo or use_mpi, not both")
    size = _renamed(np, "np", num_proc, "num_proc")
    least = _renamed(min_np, "min_np", min_num_proc, "min_num_proc")
    most = _renamed(max_np, "max_np", max_num_proc, "max_num_proc")
    is_elastic = any(value is not None for value in (least, most, host_discovery_script))
    if is_elastic and use_mpi:
        raise ValueError("horoplug.run: use_mpi: processes of an MPI job cannot come and go")
    if size is None and not is_elastic:
        size = 1
    try:
        check_folder()
    except UsageError as error:
        raise ValueError(f"horoplug.run: {error}") from None
    if cooldown_range is not None and len(cooldown_range) != 2:
        raise ValueError("horoplug.run: cooldown_range: two numbers are wanted, the least first")
    interfaces = network_interface or network_interfaces
    if interfaces is not None and not isinstance(interfaces, str):
        interfaces = ",".join(interfaces)
    flags = _flags(
        {
            "-np": size,
            "--min-np": least,
            "--max-np": most,
            "--slots-per-host": slots,
            "--reset-limit": reset_limit,
            "--blacklist-cooldown-range": cooldown_range,
            "--host-discovery-script": host_discovery_script,
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
    try:
        packed = pack(func, tuple(args), dict(kwargs or {}))
    except Exception as error:  # whatever __reduce__ raises
        name = getattr(func, "__qualname__", type(func).__name__)
        raise TypeError(
            f"horoplug.run: the function {name}, or an argument, cannot be pickled and sent to the ranks: "
            f"{why_not(func, args, kwargs, error)}; make such objects inside of the function"
        ) from error
    command = [executable or sys.executable, "-m", "horoplug.runner.functions.run_task"]
    outer = dict(os.environ if env is None else env)
    if changed := exportable({n: v for n, v in outer.items() if os.environ.get(n) != v}):
        outer[NAMED] = ",".join([*changed, *split([outer.get(NAMED, "")])])
    with contextlib.ExitStack() as stack:
        function = stack.enter_context(tempfile.TemporaryFile())
        function.write(packed)
        function.flush()
        results = stack.enter_context(tempfile.TemporaryFile())
        answer = _launch([*flags, *command], _python_path(outer), function, results)
        return _results(answer, results)


def _renamed(old: int | None, old_name: str, new: int | None, new_name: str) -> int | None:
    """The value of an argument that has a former name. ``old``, ``new``: its value by each of the names."""
    if old is not None:
        text = f"{old_name} is called {new_name} now"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return old if new is None else new


def _flags(values: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in values.items():
        if value is True or (name == "--verbose" and value):
            flags.append(name)
        elif name == "--blacklist-cooldown-range" and value is not None:
            flags += [name, *map(str, value)]
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
    flags: list[str], env: dict[str, str], function: IO[bytes], results: IO[bytes]
) -> dict[str, Any]:
    """Run the launcher, relay its output, and return its answer (see run_launcher.main)."""
    pipe_in, pipe_out = os.pipe()
    with open(pipe_in, "rb") as pipe:
        try:
            passed = [pipe_out, function.fileno(), results.fileno()]
            listed = ",".join(map(str, passed))
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _LAUNCHER,
                    str(os.getpid()),
                    listed,
                    tempfile.gettempdir(),
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
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


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


def _results(answer: Mapping[str, Any], file: IO[bytes]) -> list[Any]:
    """The results of a job by rank. ``answer``: that of the launcher; ``file``: the file for the results. Errors:
    ValueError for a wrong argument; RankError."""
    if "usage" in answer:
        raise ValueError(f"horoplug.run: {answer['usage']}")

    def load(number: int) -> Any:
        file.seek(answer["files"][str(number)])
        return pickle.load(file)

    problems = {int(number): text for number, text in answer["problems"].items()}
    results = Results(
        answer["processes"], set(answer["returned"]), answer["raised"], problems, load
    )
    text = answer["text"]
    return results.by_rank(
        answer["code"],
        text or f"the launcher ended with code {answer['code']}",
        answer["blamed"],
        text if answer["is_elastic"] else "",
    )
