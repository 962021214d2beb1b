"""Which threads of this process may call MPI, and the one that does where not all may.

MPI that the program leaves to horoplug is initialised on a thread of its own, which lives as long as MPI does and ends
it: below the level "multiple" this thread makes all calls (:func:`run`, and the core's through :func:`funnel`), which
"funneled" allows as well, since no other thread ever calls. A program that has initialised MPI itself with "serialized"
gets such a thread, too; what it has initialised with less belongs to its own thread, to which nobody can come.

A process has one MPI, so that this is one for the process."""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from horoplug._native import Worker, guard_exit

T = TypeVar("T")

LEVELS: Final = ("single", "funneled", "serialized", "multiple")
"""What threads may do with MPI, by what it has granted."""

_LAST_MOMENT = 5.0  # seconds that MPI_Finalize has if MPI has not returned from another call


class _Thread:
    """The thread that calls MPI."""

    def __init__(self, initialises: bool) -> None:
        self.initialises = initialises
        """And finalises."""
        self.limit: tuple[float, str] | None = None
        """Seconds that MPI_Finalize has, and what to say when they are over; None: as many as it needs."""
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
            if not future.done() and self.limit is None:
                text = "MPI has not returned from a call; this process ends without MPI_Finalize"
                self.limit = (_LAST_MOMENT, f"horoplug: {text}")

    def finalise(self) -> None:
        MPI = loaded()
        if self.process != os.getpid() or MPI.Is_finalized():
            return
        # mpi4py's would keep the interpreter to itself until all ranks have come.
        function = library(MPI).MPI_Finalize
        try:
            self.run(function, self.limit[0] if self.limit else None)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            assert self.limit is not None
            guard_exit(0, self.limit[1])


_thread: _Thread | None = None


def loaded() -> Any:
    """mpi4py's module MPI, if the process has it, else None."""
    return sys.modules.get("mpi4py.MPI")


def load() -> Any:
    """mpi4py's module MPI. If this is what imports it, MPI is still to be initialised. Errors: ImportError,
    RuntimeError."""
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
    """MPI's own functions: those of the very MPI that mpi4py uses, whatever else is in the process."""
    return ctypes.CDLL(MPI.__file__)  # whose scope is what it was linked with


def initialise(MPI: Any) -> None:
    """Initialise MPI, and finalise it at exit, if the program leaves that to others: with the thread level that
    ``mpi4py.rc`` asks for, but "funneled" at the least."""
    global _thread
    if MPI.Is_initialized():
        return
    _thread = _Thread(initialises=True)
    _thread.run(MPI.Init_thread, None, _level_to_ask_for(MPI))
    atexit.register(_thread.finalise)


def _level_to_ask_for(MPI: Any) -> int:
    from mpi4py import rc

    asked = rc.thread_level if rc.threads in (True, "yes") else "single"
    return max(getattr(MPI, f"THREAD_{asked.upper()}", MPI.THREAD_MULTIPLE), MPI.THREAD_FUNNELED)


def thread_level() -> str | None:
    """What MPI has granted, one of :data:`LEVELS`; None if it does not run in this process."""
    MPI = loaded()
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    granted = MPI.Query_thread()
    return next(name for name in LEVELS if granted <= getattr(MPI, f"THREAD_{name.upper()}"))


def initialised_here() -> bool:
    """Whether MPI is horoplug's, and not the program's."""
    return _thread is not None and _thread.initialises


def funnel() -> Worker | None:
    """The thread that makes all calls; None: those make them that have a reason to."""
    thread = _funnel()
    return thread.worker if thread else None


def _funnel() -> _Thread | None:
    global _thread
    level = thread_level()
    if level == "serialized" and _thread is None:
        _thread = _Thread(initialises=False)
    return _thread if level in LEVELS[:-1] else None


def run(function: Callable[..., T], *args: Any, seconds: float | None = None) -> T:
    """Call a function that calls MPI, from the thread that may, and return what it returns. Errors: the function's;
    TimeoutError if it has not returned within ``seconds``; it may still do so."""
    thread = _funnel()
    if thread is None:
        return function(*args)
    try:
        return thread.run(function, seconds, *args)
    except concurrent.futures.TimeoutError as error:  # another one before Python 3.11
        raise TimeoutError(*error.args) from None


def finalise_within(seconds: float, text: str) -> None:
    """The job has failed, and MPI_Finalize waits for all ranks, dead ones too, and for transfers that nobody will take:
    have this process end with status 1, and this line on stderr, if it takes longer than that."""
    if _thread is not None and _thread.initialises:
        _thread.limit = (seconds, text)
    else:
        guard_exit(seconds, text)
