"""Operations on arrays in GPU memory, outside of compiled programs.

Each operation is an XLA program of its own, which runs in XLA's stream and whose inputs and outputs stay on the GPU.
Python waits until the program's custom-call handler has returned. The handler waits for the other ranks, and neither
waits for the GPU.

Python and the handler share a record of the operation, an *eager call* (``csrc/bindings/jax/eager_calls.h``), which is
identified by a small number in the compiled program. Through the record Python passes the name and ``splits``, for
which compiling a new program would be wasteful, and receives the failure as an exception and the number of output rows,
which a compiled program cannot return. Where the number of rows depends on the other ranks (allgather, alltoall), a
second program copies the results to arrays of the right shape.
"""

import contextlib
import ctypes
import functools
import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from horoplug._native import Error
from horoplug.common.arguments import checked
from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call, Output
from horoplug.common.process_sets import process_set_by_id
from horoplug.common.status import exception
from horoplug.jax.library import COPY_RESULTS_TARGET, LIBRARY, PLATFORMS, ffi_lowering
from horoplug.jax.order import wait_for_programs
from horoplug.jax.primitive import SetPosition, abstract_eval, position_in, register_lowering

_POLL_INTERVAL: Final = 0.05  # seconds between checks for signals and for a failure of XLA

eager_collective_p = Primitive("horoplug_collective_now")
eager_collective_p.multiple_results = True
eager_collective_p.def_effectful_abstract_eval(abstract_eval)
register_lowering(eager_collective_p)

copy_results_p = Primitive("horoplug_copy_results")
copy_results_p.multiple_results = True


@functools.lru_cache(maxsize=64)
def _is_cuda_device(device: Any) -> bool:
    platform = str(getattr(device.client, "platform_version", ""))
    return device.platform == "gpu" and "cuda" in platform.lower()


def is_on_gpu(array: Any) -> bool:
    """Whether `array` is a JAX array in the memory of a single NVIDIA GPU."""
    if not isinstance(array, jax.Array):
        return False
    devices = array.devices()
    if len(devices) != 1 or not _is_cuda_device(next(iter(devices))):
        return False
    return array.sharding.memory_kind in (None, "device")


def perform(operation: str, arrays: Sequence[Any], call: Call) -> list[tuple[Any, Any]]:
    """See :func:`horoplug.jax.eager.perform`. Returns when the operation has been enqueued on the GPU."""
    context.engine()  # raises NotInitializedError
    spec = BY_NAME[operation]
    call = checked(spec, call)
    # The output rows of allgather and alltoall depend on the other ranks.
    rows_unknown = spec.output is Output.ROWS and operation != "reducescatter"
    position = SetPosition()
    if spec.output is Output.ROWS:
        position = SetPosition(rows=0) if rows_unknown else position_in(call.process_set)
    compiled = call._replace(name=None, splits=None)
    with _jit_enabled(), _eager_call(spec.wire_name(call.name) or "", call.splits or ()) as current:
        program = {"operation": operation, "call": compiled, "position": position}
        outputs = current.run(_start, tuple(arrays), **program, eager_call=current.number)
        if not rows_unknown:
            return [(output, None) for output in outputs]
        size = process_set_by_id(call.process_set).size() or 0
        counts = [current.row_counts(i, size) for i in range(len(arrays))]
        rows = tuple(map(sum, counts))
        outputs = current.run(_copy_results, tuple(outputs), eager_call=current.number, rows=rows)
    return [
        (output, np.array(row_counts, np.int32) if spec.received_splits else None)
        for output, row_counts in zip(outputs, counts, strict=True)
    ]


# ---- the programs ---------------------------------------------------------------------------------------------------


def _jit_enabled() -> contextlib.AbstractContextManager[None]:
    """A context in which JAX compiles programs even under ``jax.disable_jit``."""
    return jax.disable_jit(False) if jax.config.jax_disable_jit else contextlib.nullcontext()


@functools.partial(jax.jit, static_argnames=("operation", "call", "position", "eager_call"))
def _start(
    arrays: Any, *, operation: str, call: Call, position: SetPosition, eager_call: int
) -> Any:
    return eager_collective_p.bind(
        *arrays, operation=operation, call=call, position=position, eager_call=eager_call
    )


@functools.partial(jax.jit, static_argnames=("eager_call", "rows"))
def _copy_results(like: Any, *, eager_call: int, rows: tuple[int, ...]) -> Any:
    """The results as arrays with the numbers of rows in `rows`. ``like``: arrays without rows that have the dtypes and
    the other dimensions of the results."""
    return copy_results_p.bind(*like, eager_call=eager_call, rows=rows)


def _abstract_copy_results(*like: Any, eager_call: int, rows: tuple[int, ...]) -> list[Any]:
    return [
        ShapedArray((count, *array.shape[1:]), array.dtype)
        for array, count in zip(like, rows, strict=True)
    ]


def _lower_copy_results(ctx: Any, *operands: Any, eager_call: int, on_gpu: bool, **_: Any) -> Any:
    rule = ffi_lowering(COPY_RESULTS_TARGET, has_side_effect=True)
    return rule(ctx, *operands, eager_call=np.int64(eager_call), on_gpu=np.int64(on_gpu))


copy_results_p.def_abstract_eval(_abstract_copy_results)
for _platform in PLATFORMS:
    mlir.register_lowering(
        copy_results_p,
        functools.partial(_lower_copy_results, on_gpu=_platform != "cpu"),
        platform=_platform,
    )


# ---- eager calls ----------------------------------------------------------------------------------------------------


class _EagerCall:
    """The record of one operation. ``number`` identifies it in the library (``csrc/bindings/jax``)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._handlers = 0  # handlers that have returned or are expected to

    def run(self, program: Callable[..., Any], *arrays: Any, **parameters: Any) -> Any:
        """Run a program with one custom call, wait until its handler has returned, and return the outputs.

        Raises the operation's failure, or XLA's if XLA has not called the handler."""
        self._handlers += 1
        try:
            outputs = program(*arrays, **parameters)
            self._wait(outputs)
        except Exception:  # not BaseException: after an interrupt the handler may still run
            self._handlers -= 1
            raise
        return outputs

    def _wait(self, outputs: Sequence[Any]) -> None:
        while not self._has_ended(_POLL_INTERVAL):
            # XLA skips the handlers of programs whose inputs have failed.
            if all(output.is_ready() for output in outputs) and not self._has_ended(0):
                wait_for_programs()  # so that the failure is not passed on to the next program
                jax.block_until_ready(outputs)
                raise RuntimeError("XLA has not run a Horovod operation")
        reason = ctypes.c_char_p()
        status = LIBRARY.horoplug_jax_failure(self.number, ctypes.byref(reason))
        if status != 0:
            raise exception(Error(status, (reason.value or b"").decode(errors="replace")))

    def _has_ended(self, seconds: float) -> bool:
        return bool(LIBRARY.horoplug_jax_await(self.number, self._handlers, seconds))

    def row_counts(self, tensor: int, size: int) -> list[int]:
        """The number of rows of tensor ``tensor`` that each of ``size`` ranks has sent."""
        counts = (ctypes.c_int64 * size)()
        LIBRARY.horoplug_jax_row_counts(self.number, tensor, counts, size)
        return list(counts)

    def close(self) -> bool:
        """Remove the record. Returns whether its number may be reused, which is false while a handler runs."""
        return bool(LIBRARY.horoplug_jax_close(self.number, self._handlers))


class _CallNumbers:
    """Hands out the smallest free number, so that few programs are compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = 1

    def acquire(self) -> int:
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            self._next += 1
            return self._next - 1

    def release(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free, number)


_CALL_NUMBERS = _CallNumbers()


@contextlib.contextmanager
def _eager_call(name: str, splits: Sequence[int]) -> Iterator[_EagerCall]:
    current = _EagerCall(_CALL_NUMBERS.acquire())
    counts = (ctypes.c_int64 * len(splits))(*splits)
    LIBRARY.horoplug_jax_open(current.number, name.encode(), counts, len(splits))
    try:
        yield current
    finally:
        if current.close():
            _CALL_NUMBERS.release(current.number)
