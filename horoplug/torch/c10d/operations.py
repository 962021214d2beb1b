"""What a process group has in flight, how it ends, and the thread that completes futures."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version

from horoplug._native import DirectGroup, Engine, Error, Op, Status
from horoplug.base.log import logger
from horoplug.torch import streams
from horoplug.torch.c10d import hooks
from horoplug.torch.c10d.ddp_buckets import parameters_in_bucket

PYTORCH = Version(torch.__version__).release  # that of a pre-release, too
SHORT_PAUSE = 0.0005  # seconds between two looks at what is waited for
_LOOKS = 0.25  # seconds between two looks at the threads that wait for futures
_FIRST_LOOKS = 20  # after the last operation, before the thread of futures sleeps without a limit
_LOST = (Status.ABORTED, Status.SHUT_DOWN)
_CLOSE_SECONDS = 30.0  # limit for the callbacks of futures to end once the group has
_NAMES_IN_CALLBACKS = 1024  # for operations in flight; the core remembers names
# Before 2.7, PyTorch's C++ code keeps the C++ part of a Work only. If the object in Python is gone, its wait() there
# waits for ever. So works are kept until wait() is called, but no more of them than this.
_KEPT_WORKS = 256 if PYTORCH < (2, 7) else 0


class Submitted(NamedTuple):
    """An operation that the core has accepted."""

    handle: int
    device: int
    """The GPU of its tensors; -1: host memory."""
    stream: int
    """On a GPU: the stream in which its tensors were ready."""


class Pending(Protocol):
    """What :class:`Operations` needs from a ``Work``."""

    _event: Any
    _submitted: Sequence[Submitted]
    collective: bool
    requested_by: int
    """The thread that has asked for the future; 0: none has."""

    def is_completed(self) -> bool: ...

    def is_late(self) -> bool: ...

    def _settle(self) -> None: ...

    def _end(self) -> None: ...

    def _is_awaited_by_hook(self) -> bool: ...


_AnyPending = TypeVar("_AnyPending", bound=Pending)


class Operations:
    """What a process group has in flight, and the thread that completes futures."""

    def __init__(self, engine: Engine, who: str, group: Any) -> None:
        """``who``: names the group and this rank in error texts."""
        self._engine = engine
        self._group = weakref.ref(group)
        self.direct: DirectGroup | None = None
        """For the calls of the group that go to the core without Python."""
        self.who = who
        self.phrase_for_lost_rank = ""
        """Appended to the error of an operation that fails because another rank has ended."""
        self.ends_on_late_transfer = False
        """Whether the group ends if a send or recv is not done at the end of a wait with a time limit of its own."""
        self._in_flight: dict[Pending, None] = {}
        self._kept: dict[Pending, None] = {}
        self._lock = threading.Lock()
        self._waiting: dict[Pending, None] = {}  # whose futures the thread completes
        self._closed = False
        self._signal = os.eventfd(0, os.EFD_CLOEXEC)
        self._signals = select.poll()
        self._signals.register(self._signal, select.POLLIN)
        self._dozes = False  # the thread sleeps without a limit, since nothing is in flight
        self._thread: threading.Thread | None = None
        self._calls_in_callbacks = 0

    def track(self, work: _AnyPending) -> _AnyPending:
        """Keep the tensors of ``work`` alive until it is done, also if the caller drops it."""
        while (oldest := next(iter(self._in_flight), None)) is not None and oldest.is_completed():
            oldest._settle()
            self.forget(oldest)
        self._in_flight[work] = None
        if _KEPT_WORKS:
            self._kept[work] = None
            if len(self._kept) > _KEPT_WORKS:
                self.release(next(iter(self._kept)))
        if work._event is not None:
            self.complete_later(work)
        return work

    def forget(self, work: Pending) -> None:
        self._in_flight.pop(work, None)

    def release(self, work: Pending) -> None:
        """The caller has waited for ``work``, and needs it no more."""
        self._kept.pop(work, None)

    def are_done(self, submitted: Sequence[Submitted]) -> bool:
        return all(self._engine.poll(each.handle) for each in submitted)

    def end_within(self, submitted: Sequence[Submitted], seconds: float) -> bool:
        """Block until the operations are done, for at most so many seconds. Returns whether they are."""
        deadline = time.monotonic() + seconds
        for each in submitted:
            with contextlib.suppress(Error):  # it is done: it failed, or another thread finished it
                if not self._engine.wait(each.handle, max(deadline - time.monotonic(), 0)):
                    return False
        return True

    def value(self, submitted: Submitted) -> int | None:
        """Block until a send or recv is done; the rank at the other end, or None if it failed."""
        try:
            self._engine.wait(submitted.handle)
            return self._engine.value(submitted.handle)
        except Error:
            return None

    def finish(
        self, submitted: Sequence[Submitted], finish: Callable[[], None] | None
    ) -> BaseException | None:
        """Block until the operations are done, call ``finish``, and free the handles. Returns the first error, also
        if it is one of ``finish``.

        Raises only what a handler of signals raises while this call blocks; the operations are then in flight."""
        failure: BaseException | None = None
        for each in submitted:
            try:
                self._engine.wait(each.handle)
            except Error as error:
                failure = failure or self.exception(error)
                continue
            if each.device >= 0:
                failure = failure or self._failure_of(functools.partial(self._order, each))
        if finish is not None and failure is None:
            failure = self._failure_of(finish)
        for each in submitted:
            with contextlib.suppress(Error):
                self._engine.release(each.handle)
        return failure

    def _order(self, submitted: Submitted) -> None:
        """Order the caller's streams after an operation on a GPU."""
        for stream in {streams.current(submitted.device), submitted.stream}:
            self._engine.stream_wait(submitted.handle, stream)

    def _failure_of(self, function: Callable[[], None]) -> BaseException | None:
        """Call a function that completes an operation. Returns what it raises as the error of the operation."""
        try:
            function()
        except Error as error:
            return self.exception(error)
        except BaseException as error:
            return error
        return None

    def exception(self, error: Error) -> dist.DistBackendError:
        """The exception to raise for an operation that failed."""
        status, message = error.args
        cause = "timeout of the process group: " if status == Status.TIMEOUT else ""
        phrase = self.phrase_for_lost_rank if status in _LOST else ""
        return dist.DistBackendError(f"{self.who}: {cause}{message}{phrase}")

    def abort(self, reason: str) -> None:
        """End the group on all ranks."""
        with contextlib.suppress(Error):
            self._engine.abort(reason)

    def named(self, error: BaseException, tensor: torch.Tensor) -> BaseException:
        """The error, with the names of the parameters if it is that of an operation on a bucket of
        DistributedDataParallel. ``tensor``: its result."""
        if type(error) is not dist.DistBackendError:
            return error
        names = parameters_in_bucket(self._group(), tensor)
        return dist.DistBackendError(f"{error} (gradients of {names})") if names else error

    def name_in_callback(self, op: Op) -> str | None:
        """The name of an operation that a callback of a future starts; None outside of callbacks.

        Callbacks run beside the program, so that the n-th call of an operation may be another one on each rank. They
        run in the same order on all ranks: the n-th call in callbacks is the same."""
        if self._thread is None or self._thread.ident != threading.get_ident():
            return None
        self._calls_in_callbacks += 1
        return f"callback.{op.name.lower()}.{self._calls_in_callbacks % _NAMES_IN_CALLBACKS}"

    def complete_later(self, work: Pending) -> None:
        """Complete the future of ``work`` in a thread, which sleeps until an operation is done: it must not take
        processor time from the backward pass that runs meanwhile. Waits for ``work`` if no thread can be started."""
        try:
            with self._lock:
                if self._thread is None:
                    self._thread = self._started_thread()
                self._waiting[work] = None
                if self._dozes:
                    self._dozes = False
                    os.eventfd_write(self._signal, 1)
        except RuntimeError:
            work._end()
            return
        for each in work._submitted:
            try:
                self._engine.signal_when_done(each.handle, self._signal)
            except Error:  # another thread has completed the work
                os.eventfd_write(self._signal, 1)

    def _started_thread(self) -> threading.Thread:
        thread = threading.Thread(
            target=self._complete_when_done, name="horoplug futures", daemon=True
        )
        thread.start()
        if self.direct is not None and thread.ident is not None:
            # Before it completes a future, for which it needs the lock that the caller has.
            self.direct.callback_thread = thread.ident
        return thread

    def in_callback(self) -> bool:
        """Whether a callback of a future is the caller."""
        return self._thread is threading.current_thread()

    def _complete_when_done(self) -> None:
        held = False
        while True:
            if not held:
                self._sleep()
            with self._lock:
                done, held = self._next_to_complete()
                for work in done:
                    del self._waiting[work]
                is_over = self._closed and not self._waiting
            for work in done:
                work._end()
            if is_over:
                return
            if held:
                time.sleep(SHORT_PAUSE)

    def _sleep(self) -> None:
        """Sleep until an operation is done or late. If that takes long, tell the core which threads wait for it."""
        looks = 0
        while True:
            with self._lock:
                requested = [work for work in self._waiting if work.requested_by]
                self._dozes = not self._waiting and looks >= _FIRST_LOOKS
            if looks and requested:
                self._note_waits(requested)
            if self._signals.poll(None if self._dozes else 1000 * _LOOKS):
                os.eventfd_read(self._signal)
                return
            if any(work.is_late() for work in requested):
                return
            looks += 1

    def _note_waits(self, works: Sequence[Pending]) -> None:
        """Threads that have asked for futures may wait for them in C++, as DistributedDataParallel does. Threads of
        PyTorch, which run backward() on GPUs, have asked for the thread that has called it."""
        threads = {work.requested_by for work in works}
        if not threads <= hooks.threads_of_program():
            threads.update(hooks.threads_in_autograd())
        handles = [each.handle for work in works for each in work._submitted]
        with contextlib.suppress(Error):  # the engine ends
            self._engine.note_waits(handles, sorted(threads))

    def _next_to_complete(self) -> tuple[list[Pending], bool]:
        """Works that are done or late, and whether hooks hold up others. Collective ones only up to the first that is
        neither, or held up, so that callbacks run in the order of the calls, which is the same on all ranks."""
        done, is_next, held = [], True, False
        for work in self._waiting:
            if work.collective and not is_next:
                continue
            try:
                is_done = work.is_completed() or work.is_late()
                is_held = is_done and work._is_awaited_by_hook()
            except Exception:
                is_done, is_held = True, False  # what is wrong becomes the error of the work
            if not is_done:
                is_next = is_next and not work.collective
            elif is_held:
                is_next, held = False, True
            else:
                done.append(work)
        return done, held

    def close(self) -> None:
        """End the thread. The engine has shut down, so all operations are done, but callbacks of the program may still
        run. One that does not return keeps the thread, and not the program."""
        for work in list(self._in_flight):
            work._settle()
        self._kept.clear()
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is threading.current_thread():  # a callback of a future has closed the group
            return
        if thread is not None:
            os.eventfd_write(self._signal, 1)
            thread.join(_CLOSE_SECONDS)
            if thread.is_alive():
                logger.warning(
                    "%s: a callback of a future has not returned for %g s after the end of the group; it goes on",
                    self.who,
                    _CLOSE_SECONDS,
                )
                return  # the thread has the descriptor
        os.close(self._signal)
