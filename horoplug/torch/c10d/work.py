"""The ``Work`` objects of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from horoplug._native import Op, value_or_raise
from horoplug.base.log import logger
from horoplug.torch.c10d import hooks
from horoplug.torch.c10d.operations import Operations, Submitted
from horoplug.torch.c10d.profiling import Record
from horoplug.torch.dynamo import run_methods_eagerly

_Base: Any = dist.Work
_completed: Any = torch.jit.fork  # of a Python function: calls it at once


@run_methods_eagerly
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
        op: Op | None = None,
    ) -> None:
        """``tensors``: what has to stay alive. ``finish``: moves the results to the caller's tensors; it is called once
        when the operations are done. ``event``: the event in the profile, which ends with the operations. ``op``:
        names a single operation in error texts."""
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
        self.requested_by = 0
        self._hook: hooks.Hook | None = None
        self._is_of_backward = False  # as the reduction of a bucket of DistributedDataParallel
        self._event = event
        self._recorded = threading.Event() if event is not None else None
        self._op = op
        self._limit, self._deadline = 0.0, math.inf

    def limit_to(self, limit: timedelta) -> None:
        """The operations fail for this rank unless they are done so much later. They go on; the group stays usable."""
        self._limit = limit.total_seconds()
        self._deadline = time.monotonic() + self._limit

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operations are done. Raises DistBackendError if they failed, or are not done after
        ``timeout`` (0: the time limit of the call or of the group)."""
        if timeout > timedelta(0) and not self.ends_within(timeout):
            if self.is_late():
                raise self._late()
            text = (
                f"wait() timed out: {self._title()} is not done after {timeout.total_seconds():g} s"
            )
            if not self.collective and self._operations.ends_on_late_transfer:
                self._operations.abort(text)
            raise dist.DistBackendError(f"{self._operations.who}: {text}")
        if self._limit and not self.ends_within(timedelta.max):
            raise self._late()
        self._complete()
        if self._recorded is not None:
            self._recorded.wait()
        self._operations.release(self)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def ends_within(self, timeout: timedelta) -> bool:
        """Block until the operations are done, for at most ``timeout`` and the limit of the call. Returns whether they
        are."""
        seconds = min(timeout.total_seconds(), max(self._deadline - time.monotonic(), 0))
        return self._done or self._operations.end_within(self._submitted, seconds)

    def is_late(self) -> bool:
        """Whether the time limit of the call has passed."""
        return time.monotonic() >= self._deadline

    def _title(self) -> str:
        if self._op is None or len(self._submitted) != 1:
            return "the operation"
        return self._op.name.lower()

    def _late(self) -> dist.DistBackendError:
        return dist.DistBackendError(
            f"{self._operations.who}: {self._title()} is not done after {self._limit:g} s (the argument timeout of its "
            "call sets this limit)"
        )

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
        caller = sys._getframe().f_back
        if self._needs_list(caller):
            self.wait()
            complete: torch.futures.Future[Any] = _completed(self.result)
            return complete
        with self._lock:
            if self._future is not None:
                return self._future
            self._ended: torch.futures.Future[Any] = torch.futures.Future()
            # Future.set_exception is for Python alone: C++ code such as DistributedDataParallel would take the
            # exception for a result. A callback that raises gives a future that has failed for both.
            self._future = self._ended.then(value_or_raise)
            self._hook = hooks.running_hook(caller)
            self._is_of_backward = self._hook is not None or hooks.is_of_autograd(caller)
            self.requested_by = threading.get_ident()
            done = self._done
        if not done and self._operations.in_callback():
            # The callback may wait for the future, which only its own thread would complete.
            self._settle()
            done = True
        if done:
            self._hook = None  # keeps a frame alive
            self._complete_future(self._error)
        elif self._event is None:
            self._operations.complete_later(self)
        return self._future

    def _needs_list(self, caller: FrameType | None) -> bool:
        """Whether the caller is a hook for DistributedDataParallel in C++ that compresses to 16 bits: it takes only a
        future of PyTorch's own type for lists. None can be completed by Python; one that is complete can be made. All
        other callers of the class take futures of Python objects."""
        if len(self._outputs) != 1 or self._outputs[0].dtype != torch.float16:
            return False
        # Functions in C++ have no frame of Python: the caller is the function that has called backward().
        return hooks.is_of_autograd(caller)

    def _complete(self) -> None:
        """Block until the operations are done, and finish them."""
        with self._lock:
            if self._done:
                return
            if not self.collective and self._submitted:  # none if nothing was coalesced
                self._value = self._operations.value(self._submitted[0])
            error = self._operations.finish(self._submitted, self._finish)
            if error is not None and self._is_of_backward and len(self._outputs) == 1:
                error = self._operations.named(error, self._outputs[0])
            self._error = error
            self._done = True
            self._tensors = self._finish = None
        self._operations.forget(self)

    def _settle(self) -> None:
        """:meth:`_complete` for callers that are busy with other works: raises no Exception. What goes wrong becomes
        the error of this work."""
        try:
            self._complete()
        except Exception as error:
            with self._lock:
                self._error, self._done = error, True
            self._operations.forget(self)

    def _end(self) -> None:
        """Block until the operations are done, or late, and complete the future. Raises no Exception."""
        late = self.is_late() and not self.is_completed()
        if not late:
            self._settle()
        try:
            self._complete_future(self._late() if late else self._error)
        except Exception:
            logger.exception("the future of an operation of torch.distributed cannot be completed")

    def _is_awaited_by_hook(self) -> bool:
        """Whether the hook that has asked for the future still runs."""
        if self._hook is not None and not self._hook.is_running():
            self._hook = None
        return self._hook is not None

    def _complete_future(self, error: BaseException | None) -> None:
        """Complete the future with the result or an error, and end the event in the profile."""
        if self._event is not None and self._recorded is not None and not self._recorded.is_set():
            with contextlib.suppress(Exception):  # the profile lacks the event
                self._event.end()
            self._recorded.set()
        with self._lock:
            if self._future is None or self._future_is_complete:
                return
            self._future_is_complete = True
        self._ended.set_result(list(self._outputs) if error is None else error)
