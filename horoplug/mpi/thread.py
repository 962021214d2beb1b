"""Decides which threads of this process may call MPI, and runs the MPI thread where only one may.

If the program leaves MPI to horoplug, MPI is initialised on a dedicated thread, which lives as long as MPI does and
finalises it. Below thread level "multiple" that thread makes all MPI calls: Python's through :func:`run`, the core's
through :func:`mpi_worker`. Level "funneled" allows that, since no other thread ever calls MPI. A program that has
initialised MPI itself at level "serialized" gets such a thread, too. At a lower level only the program's own main
thread may call MPI, and horoplug cannot run anything there.

A process has one MPI, so the thread is a global of the process."""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from horoplug._native import Worker, guard_exit

T = TypeVar("T")

LEVELS: Final = ("single", "funneled", "serialized", "multiple")
"""The thread levels of MPI, from the most to the least restrictive."""

_FINALIZE_SECONDS = 5.0  # limit for MPI_Finalize if MPI has not returned from another call


class _MpiThread:
    """The thread that makes all MPI calls of this process."""

    def __init__(self, initialises: bool) -> None:
        self.initialises = initialises
        """Whether this thread initialises MPI, and so finalises it."""
        self.finalize_limit: tuple[float, str] | None = None
        """Limit for MPI_Finalize in seconds, and the text for stderr if it is exceeded. None: no limit."""
        self.process = os.getpid()
        self.worker = Worker()
        self._ident = 0
        self._ident = self.run(threading.get_ident, None)

    def run(self, function: Callable[..., T], seconds: float | None, *args: Any) -> T:
        if threading.get_ident() == self._ident:
            return function(*args)
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self.worker.post(call)
        try:
            return future.result(seconds)
        finally:
            if not future.done() and self.finalize_limit is None:
                text = "MPI has not returned from a call; this process ends without MPI_Finalize"
                self.finalize_limit = (_FINALIZE_SECONDS, f"horoplug: {text}")

    def finalise(self) -> None:
        MPI = loaded()
        if self.process != os.getpid() or MPI.Is_finalized():
            return
        # mpi4py's own Finalize would hold the interpreter lock until all ranks have called it.
        function = library(MPI).MPI_Finalize
        try:
            self.run(function, self.finalize_limit[0] if self.finalize_limit else None)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            assert self.finalize_limit is not None
            guard_exit(0, self.finalize_limit[1])


_thread: _MpiThread | None = None


def is_installed() -> bool:
    """Whether this interpreter has mpi4py."""
    return importlib.util.find_spec("mpi4py") is not None


def loaded() -> Any:
    """The module ``mpi4py.MPI`` if the process has imported it, else None."""
    return sys.modules.get("mpi4py.MPI")


def load() -> Any:
    """Import ``mpi4py.MPI`` and return it. An import made here leaves MPI uninitialised.

    Raises ImportError without mpi4py, and RuntimeError if mpi4py cannot open an MPI library."""
    MPI = loaded()
    if MPI is not None:
        return MPI
    import mpi4py

    initialises, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    try:
        return importlib.import_module("mpi4py.MPI")
    finally:
        mpi4py.rc.initialize = initialises


def library(MPI: Any) -> ctypes.CDLL:
    """The C functions of the MPI library that mpi4py uses, even if the process has loaded others as well."""
    return ctypes.CDLL(MPI.__file__)  # symbols resolve in the libraries that mpi4py was linked with


def initialise(MPI: Any) -> None:
    """Initialise MPI unless the program has done so, and finalise it when the process exits.

    Asks for the thread level of ``mpi4py.rc``, but at least "funneled"."""
    global _thread
    if MPI.Is_initialized():
        return
    _thread = _MpiThread(initialises=True)
    _thread.run(MPI.Init_thread, None, _level_to_ask_for(MPI))
    atexit.register(_thread.finalise)


def _level_to_ask_for(MPI: Any) -> int:
    from mpi4py import rc

    asked = rc.thread_level if rc.threads in (True, "yes") else "single"
    level: int = getattr(MPI, f"THREAD_{asked.upper()}", MPI.THREAD_MULTIPLE)
    return max(level, int(MPI.THREAD_FUNNELED))


def thread_level() -> str | None:
    """The thread level that MPI granted, one of :data:`LEVELS`; None if MPI does not run in this process."""
    MPI = loaded()
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    granted = MPI.Query_thread()
    return next(name for name in LEVELS if granted <= getattr(MPI, f"THREAD_{name.upper()}"))


def initialised_here() -> bool:
    """Whether horoplug, and not the program, has initialised MPI."""
    return _thread is not None and _thread.initialises


def mpi_worker() -> Worker | None:
    """The worker that makes all MPI calls; None if any thread may call MPI."""
    thread = _calling_thread()
    return thread.worker if thread else None


def _calling_thread() -> _MpiThread | None:
    global _thread
    level = thread_level()
    if level == "serialized" and _thread is None:
        _thread = _MpiThread(initialises=False)
    return _thread if level in LEVELS[:-1] else None


def run(function: Callable[..., T], *args: Any, seconds: float | None = None) -> T:
    """Call ``function(*args)``, which calls MPI, on a thread that may do so, and return its result.

    Raises the exceptions of ``function``, and TimeoutError if ``function`` has not returned within ``seconds``; the
    call then continues on the MPI thread."""
    thread = _calling_thread()
    if thread is None:
        return function(*args)
    try:
        return thread.run(function, seconds, *args)
    except concurrent.futures.TimeoutError as error:  # a class of its own before Python 3.11
        raise TimeoutError(*error.args) from None


def finalise_within(seconds: float, text: str) -> None:
    """Limit the time of MPI_Finalize after the job has failed.

    MPI_Finalize waits for all ranks, including dead ones, and for sends without a receiver. If it takes longer than
    ``seconds``, the process prints ``text`` on stderr and exits with status 1."""
    if _thread is not None and _thread.initialises:
        _thread.finalize_limit = (seconds, text)
    else:
        guard_exit(seconds, text)
