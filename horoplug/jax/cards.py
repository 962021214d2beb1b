"""Operations outside of compiled programs on arrays in the memory of a card: each is a program of its own, in XLA's
stream, whose inputs and outputs stay on the card.

Python waits for the handler alone, which waits for the other ranks; nobody waits for the card. The operation has a
ticket (``csrc/bindings/jax/tickets.h``), by which Python gives what is not worth compiling for, the name and
``splits``, and gets what compiled programs cannot give: the failure as an exception, and how many rows there are. If
that follows from the other ranks (allgather, alltoall), a second program brings the results to arrays of that shape.
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
from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call, Output
from horoplug.common.process_sets import process_set_by_id
from horoplug.common.status import exception
from horoplug.jax.library import LIBRARY, PLATFORMS, TAKE_TARGET, ffi_lowering
from horoplug.jax.order import wait_for_programs
from horoplug.jax.primitive import Place, abstract, place_in, register

_SLICE: Final = 0.05  # seconds between looks at signals, and at whether XLA has failed

ticketed_p = Primitive("horoplug_collective_now")
ticketed_p.multiple_results = True
ticketed_p.def_effectful_abstract_eval(abstract)
register(ticketed_p)

take_p = Primitive("horoplug_take")
take_p.multiple_results = True


@functools.lru_cache(maxsize=64)
def _is_card(device: Any) -> bool:
    platform = str(getattr(device.client, "platform_version", ""))
    return device.platform == "gpu" and "cuda" in platform.lower()


def is_on_card(array: Any) -> bool:
    """Whether it is an array of JAX in the memory of one card of NVIDIA's."""
    if not isinstance(array, jax.Array):
        return False
    devices = array.devices()
    if len(devices) != 1 or not _is_card(next(iter(devices))):
        return False
    return array.sharding.memory_kind in (None, "device")


def perform(operation: str, arrays: Sequence[Any], call: Call) -> list[tuple[Any, Any]]:
    """See :func:`horoplug.jax.adapter.perform`; returns when the operation is in order on the card."""
    context.engine()  # raises NotInitializedError
    spec = BY_NAME[operation]
    # The number of rows of allgather and alltoall is known when the other ranks have said theirs.
    is_open = spec.output is Output.ROWS and operation != "reducescatter"
    place = Place()
    if spec.output is Output.ROWS:
        place = Place(rows=0) if is_open else place_in(call.process_set)
    name = f"{operation}.{call.name}" if call.name else ""
    compiled = call._replace(name=None, splits=None)
    with _compiled(), _ticket(name, call.splits or ()) as ticket:
        program = {"operation": operation, "call": compiled, "place": place}
        outputs = ticket.run(_begin, tuple(arrays), **program, ticket=ticket.number)
        if not is_open:
            return [(output, None) for output in outputs]
        size = process_set_by_id(call.process_set).size() or 0
        counts = [ticket.row_counts(index, size) for index in range(len(arrays))]
        rows = tuple(map(sum, counts))
        outputs = ticket.run(_take, tuple(outputs), ticket=ticket.number, rows=rows)
    return [
        (output, np.array(rows, np.int32) if spec.received_splits else None)
        for output, rows in zip(outputs, counts, strict=True)
    ]


# ---- the programs ---------------------------------------------------------------------------------------------------


def _compiled() -> contextlib.AbstractContextManager[None]:
    """They are compiled even if ``jax.disable_jit`` says that nothing is."""
    return jax.disable_jit(False) if jax.config.jax_disable_jit else contextlib.nullcontext()


@functools.partial(jax.jit, static_argnames=("operation", "call", "place", "ticket"))
def _begin(arrays: Any, *, operation: str, call: Call, place: Place, ticket: int) -> Any:
    return ticketed_p.bind(*arrays, operation=operation, call=call, place=place, ticket=ticket)


@functools.partial(jax.jit, static_argnames=("ticket", "rows"))
def _take(empty: Any, *, ticket: int, rows: tuple[int, ...]) -> Any:
    """Results of `rows` rows each. ``empty``: the same with none, which say what else there is to say."""
    return take_p.bind(*empty, ticket=ticket, rows=rows)


@take_p.def_abstract_eval
def _abstract_take(*empty: Any, ticket: int, rows: tuple[int, ...]) -> list[Any]:
    return [
        ShapedArray((count, *array.shape[1:]), array.dtype)
        for array, count in zip(empty, rows, strict=True)
    ]


def _lower_take(ctx: Any, *operands: Any, ticket: int, on_card: bool, **_: Any) -> Any:
    rule = ffi_lowering(TAKE_TARGET, has_side_effect=True)
    return rule(ctx, *operands, ticket=np.int64(ticket), on_card=np.int64(on_card))


for _platform in PLATFORMS:
    mlir.register_lowering(
        take_p, functools.partial(_lower_take, on_card=_platform != "cpu"), platform=_platform
    )


# ---- tickets --------------------------------------------------------------------------------------------------------


class _Ticket:
    def __init__(self, number: int) -> None:
        self.number = number
        self._handlers = 0  # that have ended, or will

    def run(self, program: Callable[..., Any], *arrays: Any, **parameters: Any) -> Any:
        """A program of one call, until its handler has ended; gives its outputs. Raises what the operation has failed
        with, and what XLA has, if it has not called the handler."""
        self._handlers += 1
        try:
            outputs = program(*arrays, **parameters)
            self._wait(outputs)
        except Exception:  # after an interrupt the handler may still come
            self._handlers -= 1
            raise
        return outputs

    def _wait(self, outputs: Sequence[Any]) -> None:
        while not self._has_ended(_SLICE):
            # XLA ends programs without their calls if their inputs have failed.
            if all(output.is_ready() for output in outputs) and not self._has_ended(0):
                wait_for_programs()  # its failure is not handed to the next one
                jax.block_until_ready(outputs)
                raise RuntimeError("XLA has not run a Horovod operation.")
        reason = ctypes.c_char_p()
        status = LIBRARY.horoplug_jax_failure(self.number, ctypes.byref(reason))
        if status != 0:
            raise exception(Error(status, (reason.value or b"").decode(errors="replace")))

    def _has_ended(self, seconds: float) -> bool:
        return bool(LIBRARY.horoplug_jax_await(self.number, self._handlers, seconds))

    def row_counts(self, tensor: int, size: int) -> list[int]:
        """How many rows of a tensor have come from each rank."""
        counts = (ctypes.c_int64 * size)()
        LIBRARY.horoplug_jax_row_counts(self.number, tensor, counts, size)
        return list(counts)

    def close(self) -> bool:
        """Whether its number is free."""
        return bool(LIBRARY.horoplug_jax_close(self.number, self._handlers))


class _Numbers:
    """The smallest that are free, so that few programs are compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._next = 1

    def get(self) -> int:
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            self._next += 1
            return self._next - 1

    def give_back(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free, number)


_NUMBERS = _Numbers()


@contextlib.contextmanager
def _ticket(name: str, splits: Sequence[int]) -> Iterator[_Ticket]:
    ticket = _Ticket(_NUMBERS.get())
    counts = (ctypes.c_int64 * len(splits))(*splits)
    LIBRARY.horoplug_jax_open(ticket.number, name.encode(), counts, len(splits))
    try:
        yield ticket
    finally:
        if ticket.close():
            _NUMBERS.give_back(ticket.number)
