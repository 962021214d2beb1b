"""A rank of ``horoplug.run``: receives the function, calls it, and sends back the result or the exception.

Run as ``python -m horoplug.runner.functions.run_task`` with the variables that run_launcher.py sets."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from horoplug.base.config import read_secret, value
from horoplug.base.errors import HorovodInternalError, TamperedMessageError
from horoplug.base.pickling import find_unpicklable
from horoplug.base.variables import parse_secret
from horoplug.rendezvous.bootstrap.job_key import derive
from horoplug.rendezvous.bootstrap.launcher_environment import recognise
from horoplug.runner.ending.results import Failure

from .exchange import RAISED, RETURNED, WITHDRAWN, Client

PORT, ADDRESS, SECRET, SALT = (
    f"_HOROPLUG_RUN_{name}" for name in ("PORT", "ADDRESS", "SECRET", "SALT")
)
"""Variables with the address, port, secret and salt of the exchange. Address and secret default to those of the
rendezvous. With a salt, the secret is derived from the key in the file that HOROPLUG_SECRET_FILE names
(:func:`secret_of`)."""
_END_SECONDS = 5.0  # limit for a rank to end after its function has failed


def pack(function: Any, args: Any, kwargs: Any) -> bytes:
    """Pickle the function with its arguments for the ranks. Errors: those of pickling."""
    setup = {"path": [os.path.abspath(p) for p in sys.path], "python": list(sys.version_info[:2])}
    head = json.dumps(setup).encode()
    pickled: bytes = cloudpickle.dumps((function, args, kwargs))
    return len(head).to_bytes(4, "big") + head + pickled


def unpack(data: bytes | bytearray) -> Any:
    """The function and its arguments. Errors: RuntimeError for another version of Python; those of unpickling."""
    end = 4 + int.from_bytes(data[:4], "big")
    setup = json.loads(data[4:end])
    if setup["python"] != list(sys.version_info[:2]):
        there, here = (".".join(map(str, v)) for v in (setup["python"], sys.version_info[:2]))
        raise RuntimeError(f"the function comes from Python {there}, and this is {here}")
    sys.path += [path for path in setup["path"] if path not in sys.path]
    return pickle.loads(memoryview(data)[end:])


class Outcome(NamedTuple):
    """What a function has returned, or the exception that it has raised. ``is_consequence``: the exception says that
    another rank has failed; ``has_left``: the function ended without an error before it returned. A process that an
    elastic job does not need any more ends so, in ``init()``."""

    value: Any
    failure: Failure | None = None
    is_consequence: bool = False
    has_left: bool = False


def attempt(packed: Callable[[], bytes | bytearray], *first: Any) -> Outcome:
    """Call a function that :func:`pack` has packed. ``packed``: called for it; ``first``: arguments before its own
    ones. Raises nothing."""
    try:
        function, args, kwargs = unpack(packed())
        return Outcome(function(*first, *args, **kwargs))
    except BaseException as error:
        return Outcome(
            None,
            describe(error),
            is_consequence=isinstance(error, HorovodInternalError),
            has_left=isinstance(error, SystemExit) and not error.code,
        )


def main() -> int:
    """Run the rank; returns its exit code."""
    client = Client(
        os.environ.pop(ADDRESS, "") or os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        int(os.environ.pop(PORT)),
        _secret(),
        _number(),
        value("ENCRYPT"),
    )
    outcome = attempt(client.function)
    if outcome.failure is not None:
        return _fail(client, outcome)
    try:
        cloudpickle.dump(outcome.value, client, protocol=5)
        client.finish(RETURNED)
    except ConnectionError:
        return 1  # the job has ended, and the launcher has reported why
    except TamperedMessageError as error:
        print(f"horoplug.run: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        kind = f"{type(outcome.value).__module__}.{type(outcome.value).__qualname__}"
        why = find_unpicklable(outcome.value, "result") or " ".join(str(error).split())
        problem = TypeError(f"the function's result, a {kind}, cannot be pickled: {why}")
        problem.__cause__ = error
        return _fail(client, Outcome(None, describe(problem)))
    return 0


def secret_of(file: str, salt: str) -> bytes:
    """The exchange's secret for a key file and random text. Errors: ValueError with a one-line message."""
    return derive(read_secret(file), f"run {salt}")


def _secret() -> bytes:
    if salt := os.environ.pop(SALT, ""):
        return secret_of(value("SECRET_FILE"), salt)
    return parse_secret(os.environ.pop(SECRET, "") or os.environ["_HOROVOD_SECRET_KEY"])


def _number() -> int:
    """The number by which the exchange knows this process: its rank, or that of a process of an elastic job."""
    process: int | None = value("ELASTIC_PROCESS")
    if process is not None:
        return process
    if "HOROVOD_RANK" in os.environ:
        return int(os.environ["HOROVOD_RANK"])
    launched = recognise(os.environ)  # the process was started by mpirun
    return launched.rank if launched is not None else 0


def _fail(client: Client, outcome: Outcome) -> int:
    """Report a failure; returns the exit code. The process ends in 5 s even if a thread of the function keeps
    running."""
    assert outcome.failure is not None
    is_elastic = value("ELASTIC_PROCESS") is not None
    code = 0 if is_elastic and outcome.has_left else 1
    with contextlib.suppress(ConnectionError):  # the job is over
        client.finish(WITHDRAWN)  # withdraw a partial result
        client.write(pickle.dumps(tuple(outcome.failure)))
        client.finish(RAISED)
    if is_elastic and code:
        with contextlib.suppress(OSError):  # the job may go on without this process
            print(outcome.failure.trace, file=sys.stderr, flush=True)
    timer = threading.Timer(_END_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


def describe(error: BaseException) -> Failure:
    """Describe an exception for the caller, without the stack frames of this module."""
    if isinstance(error, SystemExit):
        text = f"the function called sys.exit({'' if error.code is None else repr(error.code)})"
    else:
        text = traceback.format_exception_only(error)[-1].strip()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    pickled = None
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # many exceptions can be pickled but not unpickled
    except Exception:
        pickled = None
    return Failure(text, "".join(lines).rstrip(), pickled)


if __name__ == "__main__":
    # Imported by name, since objects pickled in __main__ cannot be unpickled elsewhere.
    from . import run_task

    sys.exit(run_task.main())
