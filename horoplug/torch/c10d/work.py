"""The operations in flight of a process group: the ``Work`` objects of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from horoplug._native import Engine, Error, Status
from horoplug.torch import streams
from horoplug.torch.c10d.ddp_buckets import parameters_in_bucket
from horoplug.torch.c10d.profiling import Record

_SHORT_PAUSE = (
    0.0005  # seconds between two looks at an operation that is waited for with a time limit
)


class Submitted(NamedTuple):
    """An operation that the core has accepted."""

    handle: int
    device: int
    """The GPU of its tensors; -1: host memory."""
    stream: int
    """On a GPU: the stream in which its tensors were ready."""


_Base: Any = dist.Work


class Work(_Base):  # type: ignore[misc]
    """Operations of one call of ``torch.distributed``. Keeps their tensors until they are done.

    An operation on a GPU is done when its work is enqueued on the core's stream. ``wait`` orders the caller's stream
    after that work, as for NCCL; it does not make the host wait for the GPU."""

    def __init__(
        self,
        operations: Operations,
        submitted: Sequence[Submitted],
        tensors: Any,
        outputs: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
        collective: bool = True,
        event: Record | None = None,
    ) -> None:
        """``tensors``: what has to stay alive. ``finish``: moves the results to the caller's tensors; it is called once
        when the operations are done. ``event``: the event in the profile, which ends with the operations."""
        super().__init__()
        self._operations = operations
        self._submitted = submitted
        self._tensors = tensors
        self._outputs = outputs
        self._finish = finish
        self.collective = collective
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._value: int | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._future_is_complete = False
        self._event = event
        self._recorded = threading.Event() if event is not None else None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operations are done. Raises DistBackendError if they failed, or are not done after
        ``timeout`` (0: the time limit of the group)."""
        if timeout > timedelta(0) and not self._done:
            self._await_for(timeout)
        self._complete()
        if self._recorded is not None:
            self._recorded.wait()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def _await_for(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise dist.DistBackendError(
                    f"{self._operations.who}: wait() timed out: the operation is not done after "
                    f"{timeout.total_seconds():g} s"
                )
            time.sleep(_SHORT_PAUSE)

    def is_completed(self) -> bool:
        """Whether ``wait`` returns or raises without blocking."""
        return self._done or self._operations.are_done(self._submitted)

    def is_success(self) -> bool:
        """Whether the operations are done and did not fail."""
        if not self.is_completed():
            return False
        self._complete()
        return self._error is None

    def exception(self) -> BaseException | None:
        """The error of operations that are done; None: they are not done, or succeeded."""
        if self.is_completed():
            self._complete()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors with the results."""
        return list(self._outputs)

    def _source_rank(self) -> int:
        """The rank that has sent the tensor of a recv. Blocks until the operation is done."""
        self.wait()
        assert self._value is not None
        return self._value

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that gets the tensors with the results, or the error."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._ended: torch.futures.Future[None] = torch.futures.Future()
            # Future.set_exception is for Python alone: C++ code such as DistributedDataParallel would take the
            # exception for a result. A callback that raises gives a future that has failed for both.
            self._future = self._ended.then(self._outcome)
            done = self._done
        if not done and self._operations.in_callback():
            # The callback may wait for the future, which only its own thread would complete.
            self._complete()
            done = True
        if done:
            self._complete_future()
        elif self._event is None:
            self._operations.complete_later(self)
        return self._future

    def _complete(self) -> None:
        """Block until the operations are done, and finish them."""
        with self._lock:
            if self._done:
                return
            if not self.collective:
                self._value = self._operations.value(self._submitted[0])
            self._error = self._operations.finish(self._submitted, self._finish)
            if self._error is not None and self.collective and len(self._outputs) == 1:
                self._error = self._operations.named(self._error, self._outputs[0])
            self._done = True
            self._tensors = self._finish = None
        self._operations.forget(self)

    def _complete_future(self) -> None:
        """Complete the future, and end the event in the profile."""
        if self._event is not None and self._recorded is not None and not self._recorded.is_set():
            self._event.end()
            self._recorded.set()
        with self._lock:
            if self._future is None or self._future_is_complete:
                return
            self._future_is_complete = True
        self._ended.set_result(None)

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return list(self._outputs)


class Operations:
    """What a process group has in flight, and the thread that completes futures."""

    def __init__(self, engine: Engine, who: str, group: Any) -> None:
        """``who``: names the group and this rank in error texts."""
        self._engine = engine
        self._group = weakref.ref(group)
        self.who = who
        self._in_flight: dict[Work, None] = {}
        self._lock = threading.Lock()
        self._waiting: dict[Work, None] = {}  # whose futures the thread completes
        self._closed = False
        self._signal = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    def track(self, work: Work) -> Work:
        """Keep the tensors of ``work`` alive until it is done, also if the caller drops it."""
        while (oldest := next(iter(self._in_flight), None)) is not None and oldest.is_completed():
            oldest._complete()
            self.forget(oldest)
        self._in_flight[work] = None
        if work._event is not None:
            self.complete_later(work)
        return work

    def forget(self, work: Work) -> None:
        self._in_flight.pop(work, None)

    def are_done(self, submitted: Sequence[Submitted]) -> bool:
        return all(self._engine.poll(each.handle) for each in submitted)

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
        """Block until the operations are done, call ``finish``, and free the handles. Returns the first error."""
        failure: BaseException | None = None
        for each in submitted:
            try:
                self._engine.wait(each.handle)
                if each.device >= 0:
                    for stream in {streams.current(each.device), each.stream}:
                        self._engine.stream_wait(each.handle, stream)
            except Error as error:
                failure = failure or self.exception(error)
        if finish is not None and failure is None:
            try:
                finish()
            except Error as error:
                failure = self.exception(error)
            except Exception as error:
                failure = error
        for each in submitted:
            with contextlib.suppress(Error):
                self._engine.release(each.handle)
        return failure

    def exception(self, error: Error) -> dist.DistBackendError:
        """The exception to raise for an operation that failed."""
        status, message = error.args
        cause = "timeout of the process group: " if status == Status.TIMEOUT else ""
        return dist.DistBackendError(f"{self.who}: {cause}{message}")

    def named(self, error: BaseException, tensor: torch.Tensor) -> BaseException:
        """The error, with the names of the parameters if ``tensor`` is a bucket of DistributedDataParallel."""
        names = parameters_in_bucket(self._group(), tensor)
        return type(error)(f"{error} (gradients of {names})") if names else error

    def complete_later(self, work: Work) -> None:
        """Complete the future of ``work`` in a thread, which sleeps until an operation is done: it must not take
        processor time from the backward pass that runs meanwhile."""
        with self._lock:
            self._waiting[work] = None
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._complete_when_done, name="horoplug futures", daemon=True
                )
                self._thread.start()
        for each in work._submitted:
            try:
                self._engine.signal_when_done(each.handle, self._signal)
            except Error:  # another thread has completed the work
                os.eventfd_write(self._signal, 1)

    def in_callback(self) -> bool:
        """Whether a callback of a future is the caller."""
        return self._thread is threading.current_thread()

    def _complete_when_done(self) -> None:
        while True:
            os.eventfd_read(self._signal)
            with self._lock:
                done = [work for work in self._waiting if work.is_completed()]
                for work in done:
                    del self._waiting[work]
                is_over = self._closed and not self._waiting
            for work in done:
                work._complete()
                work._complete_future()
            if is_over:
                return

    def close(self) -> None:
        """End the thread. The engine has shut down, so all operations are done."""
        for work in list(self._in_flight):
            work._complete()
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is threading.current_thread():  # a callback of a future has closed the group
            return
        if thread is not None:
            os.eventfd_write(self._signal, 1)
            thread.join()
        os.close(self._signal)
