"""Operations in flight: from a framework's tensors to the core and back.

The way of a call: a function made by :mod:`horoplug.common.variants` -> :func:`submit` -> ``Engine.submit`` of the
core, or, if the caller waits for the result, :func:`perform` -> ``Engine.perform``. What is particular to a framework
is behind :class:`Adapter`.

An operation on a card is done when its work is in the core's stream, where the card finds it in its own time; nobody
waits for the card. What the caller puts into its stream after the wait for the operation comes after that work.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

from horoplug._native import DeviceMemory, Engine, Error, Memory
from horoplug.base.errors import HorovodInternalError
from horoplug.common import dtypes
from horoplug.common.context import context
from horoplug.common.opspec import Call, OpSpec, Output
from horoplug.common.reduce_ops import Average
from horoplug.common.status import exception

CPU: Final = -1  # where a card has its number

Tensor = Any
Described = tuple[Tensor, int, int, Sequence[int], int]


class Adapter(Protocol):
    """What the operations need to know of a framework's tensors."""

    tensor_type: Any  # the class, for signatures
    compression: Any  # the default of `compression=`; None: the framework has no such argument

    def describe(self, tensor: Tensor, in_place: bool) -> Described:
        """``(tensor, dtype code, address, shape, device)`` with the tensor dense and in row-major order: a copy if need
        be. The device is a card's number or :data:`CPU`. ValueError if the result could not be copied back
        (``in_place``). TypeError for what is no tensor."""

    def stream(self, device: int, tensors: Sequence[Tensor]) -> int:
        """The stream (a CUstream as an integer) of that card that the caller is about to use tensors in, or has used
        them in last."""

    def empty_like(self, tensor: Tensor) -> tuple[Tensor, int]:
        """A tensor to put a result in, and its address."""

    def copy_back(self, result: Tensor, tensor: Tensor) -> None:
        """Overwrite the tensor that an operation in place was asked for with the result in its dense copy."""

    def from_memory(
        self, memory: Memory | DeviceMemory | None, like: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """A tensor around memory of the core, where ``like`` is, without a copy; None: a tensor without elements."""

    def to_counts(self, splits: Any) -> list[int]:
        """`splits` as integers. ValueError for anything else."""

    def from_counts(self, counts: Sequence[int]) -> Tensor:
        """Row counts as an int32 tensor."""

    def run(self, spec: OpSpec, tensors: Sequence[Tensor], call: Call, grouped: bool) -> Any:
        """A blocking, out-of-place operation: :func:`perform`, made differentiable where that has a meaning."""


class Operation:
    """One submission. It keeps its tensors alive until the core is done with them."""

    __slots__ = (
        "adapter",
        "device",
        "engine",
        "grouped",
        "handle",
        "inputs",
        "number",
        "outputs",
        "row_counts",
        "spec",
        "stream",
        "targets",
    )

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter,
        spec: OpSpec,
        inputs: list[Tensor],
        outputs: list[Tensor] | None,
        grouped: bool,
        device: int = CPU,
        stream: int = 0,
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self.spec = spec
        self.inputs = inputs
        self.outputs = outputs
        self.grouped = grouped
        self.device = device
        self.stream = stream  # of a card: the one that the tensors were ready in
        # In place, where dense copies are reduced instead: the tensors that get the results.
        self.targets: Sequence[Tensor] | None = None
        self.row_counts: list[list[int]] = []  # per tensor, once it is done: rows from each rank
        self.handle = 0
        # From here on the context holds the tensors: an interrupt between any two lines cannot free them.
        self.number = context.track(self)

    def done(self) -> bool:
        """Whether :meth:`wait` will not block. Only after it may the result of one on a card be used."""
        done = self.engine.poll(self.handle)
        if done:
            context.waited()
        return done

    def wait(self) -> Any:
        """Block until done; return the output, or for a group the list of outputs (with received splits if the
        operation has them).

        Raises the exception that belongs to the failure. After a KeyboardInterrupt the operation is still in flight and
        can be waited for again."""
        stream = 0
        try:
            self.engine.wait(self.handle)
            if self.device != CPU:
                stream = self.adapter.stream(self.device, self.inputs)
                for later in {stream, self.stream}:
                    self.engine.stream_wait(self.handle, later)
            outputs = self._collect(stream) if self.outputs is None else self.outputs
        except Error as error:
            self.let_go()
            self.forget()
            raise exception(error) from None
        self.forget()
        if self.targets is not None:
            for result, tensor in zip(outputs, self.targets, strict=True):
                if result is not tensor:
                    self.adapter.copy_back(result, tensor)
            outputs = list(self.targets)
        return outputs if self.grouped else outputs[0]

    def _collect(self, stream: int) -> list[Any]:
        outputs = []
        for index, tensor in enumerate(self.inputs):
            result = self.engine.result(self.handle, index, stream)
            shape = (result.rows, *tensor.shape[1:])
            output = self.adapter.from_memory(result.memory, tensor, shape)
            self.row_counts.append(result.row_counts)
            if self.spec.received_splits:
                output = output, self.adapter.from_counts(result.row_counts)
            outputs.append(output)
        return outputs

    def let_go(self) -> None:
        """Nobody will wait for it: what is put next into the stream of its tensors comes after what a card still does
        to them."""
        if self.device != CPU:
            with contextlib.suppress(Error):
                self.engine.stream_wait(self.handle, self.stream)

    def forget(self) -> None:
        """Let go of the tensors and of the core's handle, once it is done. Idempotent."""
        context.waited()
        if context.operations.pop(self.number, None) is not None:
            self.engine.release(self.handle)


class Parts:
    """A group of several dtypes, or in the memory of the host and of a card: one operation for each of them, since a
    group of the core has one."""

    def __init__(self, parts: list[tuple[list[int], Operation]]) -> None:
        self.parts = parts
        self.number = context.track(self)

    def done(self) -> bool:
        return all(operation.done() for _, operation in self.parts)

    def wait(self) -> Any:
        """The outputs in the order of the group. Every part is waited for, even if one has failed."""
        outputs: dict[int, Any] = {}
        failure: HorovodInternalError | None = None
        for places, operation in self.parts:
            try:
                outputs.update(zip(places, operation.wait(), strict=True))
            except HorovodInternalError as error:
                failure = failure or error
        context.operations.pop(self.number, None)
        if failure is not None:
            raise failure
        return [outputs[place] for place in range(len(outputs))]

    def let_go(self) -> None:
        """The parts are entries of their own."""

    @property
    def row_counts(self) -> list[list[int]]:
        """Per tensor, once it is done: rows from each rank."""
        counts: dict[int, list[int]] = {}
        for places, operation in self.parts:
            counts.update(zip(places, operation.row_counts, strict=True))
        return [counts[place] for place in range(len(counts))]


def submit(
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    call: Call,
    grouped: bool = False,
    in_place: bool = False,
    blocking: bool = False,
) -> Operation | Parts:
    """Hand an operation to the core and return at once. ``blocking``: the caller waits for it next, so that this may
    begin to wait; failures of the operation itself come from here, too.

    Raises TypeError and ValueError for what this rank alone can see to be wrong (dtype, device, layout, arguments, a
    name that is in flight), NotInitializedError, and HorovodInternalError if the job is over."""
    engine = context.engine()
    described = [adapter.describe(tensor, in_place) for tensor in tensors]
    if grouped and len({(code, device) for _, code, _, _, device in described}) != 1:
        return _submit_parts(engine, adapter, spec, tensors, described, call, in_place)
    return _submit(engine, adapter, spec, tensors, described, call, grouped, in_place, blocking)


def perform(
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    call: Call,
    grouped: bool = False,
    in_place: bool = False,
) -> Any:
    """``submit(...).wait()``, for less: small operations that block are all about latency."""
    if grouped or spec.output is not Output.LIKE_INPUT:
        return submit(adapter, spec, tensors, call, grouped, in_place, blocking=True).wait()
    engine = context.engine()
    given = tensors[0]
    described = adapter.describe(given, in_place)
    tensor, code, address, shape, device = described
    if device != CPU:
        operation = _submit(
            engine, adapter, spec, tensors, [described], call, False, in_place, blocking=True
        )
        return operation.wait()
    if code == dtypes.BOOL:
        _check_bool(spec, call)
    output, target = (tensor, address) if in_place else adapter.empty_like(tensor)
    name = _core_name(spec, call)
    number = context.hold((tensor, output))  # whatever interrupts
    try:
        handle = engine.perform(
            spec.code, code, ((address, target, shape),), name, *call[1:], -1, False
        )
    except Error as error:
        context.operations.pop(number, None)
        raise _failure(error) from None
    except Exception:  # an argument of a wrong type
        context.operations.pop(number, None)
        raise
    if handle:  # not done yet
        operation = Operation(engine, adapter, spec, [tensor], [output], False)
        operation.handle = handle
        if in_place:
            operation.targets = tensors
        context.operations.pop(number, None)
        if name:
            context.submitted(call.process_set, name)
        return operation.wait()
    context.operations.pop(number, None)
    context.waited()
    if in_place and tensor is not given:
        adapter.copy_back(tensor, given)
        return given
    return output


def _failure(error: Error) -> ValueError | HorovodInternalError:
    """What to raise for an operation that was refused, or has failed while it was waited for."""
    failure = exception(error)
    if isinstance(failure, HorovodInternalError):
        context.waited()
    return failure


def _check_bool(spec: OpSpec, call: Call) -> None:
    if spec.reduces and call.reduce_op == Average:
        raise ValueError(f"{spec.name} of bool has no average; use op=Max (or) or op=Min (and).")


def _core_name(spec: OpSpec, call: Call) -> str | None:
    """The name in the core. Raises ValueError if it is in flight."""
    if not call.name:
        return None
    name = f"{spec.name}.{call.name}"
    context.check_name(call.process_set, name)
    return name


def _submit(
    engine: Engine,
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    described: Sequence[Described],
    call: Call,
    grouped: bool,
    in_place: bool,
    blocking: bool = False,
) -> Operation:
    code = described[0][1]
    if code == dtypes.BOOL:
        _check_bool(spec, call)
    if spec.least_ndim and any(len(shape) < spec.least_ndim for _, _, _, shape, _ in described):
        raise ValueError(f"{spec.name} needs a first dimension to divide; a scalar has none.")
    if call.splits is not None:
        counts = adapter.to_counts(call.splits)
        call = call._replace(splits=counts)
        # As in Horovod, rows beyond the splits are sent nowhere.
        described = [
            (tensor, code, address, (min(sum(counts), shape[0]), *shape[1:]), device)
            for tensor, code, address, shape, device in described
        ]

    inputs = [tensor for tensor, _, _, _, _ in described]
    device, stream = described[0][4], 0
    place: dict[str, Any] = {}
    if device != CPU:
        stream = adapter.stream(device, inputs)
        place = {"device": device, "stream": stream}
    outputs: list[Tensor] | None
    if spec.output is Output.ROWS:
        outputs = None
        rows = [(address, 0, shape) for _, _, address, shape, _ in described]
    elif in_place:
        outputs = inputs
        rows = [(address, address, shape) for _, _, address, shape, _ in described]
    else:
        made = [adapter.empty_like(tensor) for tensor in inputs]
        outputs = [tensor for tensor, _ in made]
        rows = [
            (address, target, shape)
            for (_, _, address, shape, _), (_, target) in zip(described, made, strict=True)
        ]

    name = _core_name(spec, call)
    operation = Operation(engine, adapter, spec, inputs, outputs, grouped, device, stream)
    if in_place and any(i is not t for i, t in zip(inputs, tensors, strict=True)):
        operation.targets = tensors
    try:
        start = engine.perform if blocking else engine.submit
        operation.handle = start(spec.code, code, rows, name, *call[1:], **place)
    except Error as error:
        context.operations.pop(operation.number, None)
        raise _failure(error) from None
    except Exception:  # an argument of a wrong type
        context.operations.pop(operation.number, None)
        raise
    if name:
        context.submitted(call.process_set, name)
    return operation


def _submit_parts(
    engine: Engine,
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    described: list[Described],
    call: Call,
    in_place: bool,
) -> Parts:
    if not described:
        raise ValueError(f"grouped_{spec.name} needs at least one tensor.")
    places: dict[tuple[int, int], list[int]] = {}
    for place, (_, code, _, _, device) in enumerate(described):
        places.setdefault((code, device), []).append(place)
    on_both = len({device for _, _, _, _, device in described}) > 1
    parts = []
    for (code, device), of_part in places.items():
        suffix = f"{dtypes.NAMES[code]}{'.gpu' if on_both and device != CPU else ''}"
        name = f"{call.name}.{suffix}" if call.name else None
        mine = [tensors[place] for place in of_part]
        part = call._replace(name=name)
        these = [described[place] for place in of_part]
        operation = _submit(engine, adapter, spec, mine, these, part, True, in_place)
        parts.append((of_part, operation))
    return Parts(parts)
