"""Submitting operations to the core, and waiting for them.

A call takes this path: a public function made by :mod:`horoplug.common.variants` -> :func:`submit` ->
``Engine.submit`` of the core; or, if the caller blocks, :func:`perform` -> ``Engine.perform``. An :class:`Adapter`
does what depends on the framework.

An operation on a GPU is done when its work is enqueued on the core's stream; the host does not wait for the GPU.
``wait`` orders the caller's stream after that work.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from horoplug._native import (
    DeviceMemory,
    DirectFunction,
    DirectOutput,
    Engine,
    Error,
    Memory,
    Op,
    Result,
    Takes,
)
from horoplug.base.errors import HorovodInternalError
from horoplug.common import dtypes
from horoplug.common.arguments import checked
from horoplug.common.context import context
from horoplug.common.in_flight import Waitable
from horoplug.common.opspec import Call, OpSpec, Output
from horoplug.common.partition import Part, join_parts, split_group
from horoplug.common.reduce_ops import Average, Max, Min, Product, Sum
from horoplug.common.status import exception

CPU: Final = -1  # in place of a GPU's ordinal

Function = TypeVar("Function", bound=Callable[..., Any])
Tensor = Any
Described = tuple[Tensor, int, int, Sequence[int], int]


class Documented(NamedTuple):
    """What the documentation of the operations says about a framework's tensors."""

    tensor: str  # what an operation takes
    dtypes: str
    make: str  # the function that makes a tensor of a list, in examples


class Adapter(Protocol):
    """What the operations need from a framework's tensors."""

    tensor_type: Any  # the class of tensors, for signatures
    compression: Any  # default of `compression=`; None: the framework has no such argument

    def describe(self, tensor: Tensor, in_place: bool) -> Described:
        """``(tensor, dtype code, address, shape, device)``. The returned tensor is dense and in row-major order; it is
        a copy of the argument if necessary. The device is the ordinal of a GPU, or :data:`CPU`.

        Raises TypeError for an object that is not a tensor, and ValueError for a tensor that is not supported or, with
        ``in_place``, cannot be overwritten."""

    def stream(self, device: int, tensors: Sequence[Tensor]) -> int:
        """The CUDA stream (CUstream) on GPU ``device`` in which the caller uses the tensors now."""

    def empty_like(self, tensor: Tensor) -> tuple[Tensor, int]:
        """A new tensor for a result, and its address."""

    def copy_back(self, result: Tensor, tensor: Tensor) -> None:
        """Copy the result of an in-place operation from the dense copy that it ran on to the caller's tensor."""

    def from_memory(
        self, memory: Memory | DeviceMemory | None, like: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """A tensor that wraps memory of the core without a copy, on the device and with the dtype of ``like``. If
        ``memory`` is None, the tensor has no elements."""

    def to_counts(self, splits: Any) -> list[int]:
        """`splits` as integers. Raises ValueError for anything but a vector of integers."""

    def from_counts(self, counts: Sequence[int]) -> Tensor:
        """Row counts as an int32 tensor."""

    def run(self, spec: OpSpec, tensors: Sequence[Tensor], call: Call, grouped: bool) -> Any:
        """Run a blocking, out-of-place operation: :func:`perform`, with gradients where the framework has them."""


class Direct(NamedTuple):
    """How the core reads a framework's tensors without Python; see csrc/bindings/python/direct_call.cc."""

    tensor_type: type  # of tensors with the buffer protocol, or with:
    exchange: Any  # DLPack's __dlpack_c_exchange_api__; None: the buffer protocol
    empty_like: Any  # makes a tensor for a result
    empty: Any  # (tensor, shape): the same, for one of another shape


class DocumentedAdapter(Adapter, Protocol):
    """An adapter for which :mod:`horoplug.common.variants` makes public functions."""

    documented: Documented
    direct: Direct | None  # None: the core cannot


class Operation(Waitable):
    """One operation of the core, on one tensor or on a group. Keeps its tensors alive until it is done."""

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
        self.stream = stream  # on a GPU: the stream in which the inputs were ready
        # In-place operations that run on dense copies: the tensors that get the results.
        self.targets: Sequence[Tensor] | None = None
        self.row_counts: list[list[int]] = []  # per tensor, once done: rows from each rank
        self.handle = 0  # the core's
        # The user's handle. From here on the context holds the tensors, so an interrupt cannot free them.
        self.number = context.track(self)

    def done(self) -> bool:
        done = self.engine.poll(self.handle)
        if done:
            context.waited()
        return done

    def wait(self) -> Any:
        """Block until done; return the output, or the list of outputs of a group. Operations with received splits
        return ``(output, rows received from each rank)`` in place of each output."""
        stream = 0
        try:
            self.engine.wait(self.handle)
            if self.device != CPU:
                stream = self.adapter.stream(self.device, self.inputs)
                for later in {stream, self.stream}:
                    self.engine.stream_wait(self.handle, later)
        except Error as error:
            self.abandon()
            self._forget()
            raise exception(error) from None
        # From here on the operation is over, whatever the conversion of its results raises.
        try:
            outputs = self._collect(stream) if self.outputs is None else self.outputs
        except Error as error:
            self.abandon()
            raise exception(error) from None
        finally:
            self._forget()
        if self.targets is not None:
            for result, tensor in zip(outputs, self.targets, strict=True):
                if result is not tensor:
                    self.adapter.copy_back(result, tensor)
            outputs = list(self.targets)
        return outputs if self.grouped else outputs[0]

    def _collect(self, stream: int) -> list[Any]:
        """The outputs that the core has allocated. ``stream``: the stream in which the caller uses them."""
        outputs = []
        for index, tensor in enumerate(self.inputs):
            result = self.engine.result(self.handle, index, stream)
            output = _tensor_of(self.adapter, result, tensor)
            self.row_counts.append(result.row_counts)
            if self.spec.received_splits:
                output = output, self.adapter.from_counts(result.row_counts)
            outputs.append(output)
        return outputs

    def abandon(self) -> None:
        if self.device != CPU:
            with contextlib.suppress(Error):
                self.engine.stream_wait(self.handle, self.stream)

    def _forget(self) -> None:
        """Free the handles of an operation that is done. Idempotent."""
        context.waited()
        if context.operations.pop(self.number, None) is not None:
            self.engine.release(self.handle)


class SplitGroup(Waitable):
    """A group whose tensors have several dtypes, or are on several devices: one :class:`Operation` for each part."""

    def __init__(self, parts: list[Part[Any]], operations: list[Operation]) -> None:
        self.parts = parts
        self.operations = operations
        self.outputs: list[Any] = []
        self.failure: Exception | None = None
        self.number = context.track(self)

    def done(self) -> bool:
        return all(operation.done() for operation in self.operations)

    def wait(self) -> Any:
        """Block until all parts are done, even if one fails; return the outputs in the order of the group."""
        while len(self.outputs) < len(self.operations):  # a second call goes on after an interrupt
            operation = self.operations[len(self.outputs)]
            try:
                output = operation.wait()
            except Exception as error:
                if operation.number in context.operations:  # interrupted by a handler of signals
                    raise
                output, self.failure = None, self.failure or error
            self.outputs.append(output)
        context.operations.pop(self.number, None)
        if self.failure is not None:
            raise self.failure
        return join_parts(self.parts, self.outputs)

    def abandon(self) -> None:
        """Does nothing: the context has the operations of the parts as well."""

    @property
    def row_counts(self) -> list[list[int]]:
        """The row counts of all tensors in the order of the group; see :attr:`Operation.row_counts`."""
        return join_parts(self.parts, [operation.row_counts for operation in self.operations])


def submit(
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    call: Call,
    grouped: bool = False,
    in_place: bool = False,
    blocking: bool = False,
) -> Operation | SplitGroup:
    """Submit an operation to the core and return at once. ``blocking``: the caller waits for the operation next, so
    this call may wait briefly, and raises the failure of an operation that fails meanwhile.

    Raises TypeError or ValueError for mistakes of this rank alone (dtype, device, layout, arguments, a name that is in
    flight), NotInitializedError before ``init``, and HorovodInternalError if the job has ended."""
    engine = context.engine()
    described = [adapter.describe(tensor, in_place) for tensor in tensors]
    if grouped and len({(code, device) for _, code, _, _, device in described}) != 1:
        return _submit_split(engine, adapter, spec, tensors, described, call, in_place)
    return _submit(engine, adapter, spec, tensors, described, call, grouped, in_place, blocking)


def perform(
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    call: Call,
    grouped: bool = False,
    in_place: bool = False,
) -> Any:
    """``submit(...).wait()`` with less overhead for one tensor in host memory, where latency matters most."""
    if grouped or not spec.caller_allocates:
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
        spec.check_bool(call.reduce_op)
    output, target = (tensor, address) if in_place else adapter.empty_like(tensor)
    name = _free_name(spec, call)
    key = context.hold((tensor, output))
    try:
        handle = engine.perform(  # positional arguments: keywords would take a microsecond
            spec.code,
            code,
            ((address, target, shape),),
            name,
            call.reduce_op,
            call.root,
            call.prescale,
            call.postscale,
            call.splits,
            call.process_set,
            call.wire_dtype,
            call.tag,
            call.layout,
            CPU,
            0,
            False,
        )
    except Error as error:
        context.blocking.pop(key, None)
        raise _failure(error) from None
    except Exception:  # an argument of a wrong type
        context.blocking.pop(key, None)
        checked(spec, call)  # raises an error that names it
        raise
    if handle:  # not done yet
        operation = Operation(engine, adapter, spec, [tensor], [output], False)
        operation.handle = handle
        if in_place:
            operation.targets = tensors
        context.blocking.pop(key, None)
        if name:
            context.submitted(call.process_set, name)
        return operation.wait()
    context.blocking.pop(key, None)
    context.waited()
    if in_place and tensor is not given:
        adapter.copy_back(tensor, given)
        return given
    return output


class Usual(NamedTuple):
    """What the calls of an operation have in common that the core performs without Python."""

    reductions: Sequence[int] = ()
    root: str | None = None  # the argument that is the other rank
    has_tag: bool = False
    rows: DirectOutput | None = None  # the result, if its number of rows depends on the other ranks


_REDUCTIONS = (Average, Sum, Min, Max, Product)
_USUAL = {
    "allreduce": Usual(_REDUCTIONS),
    "allgather": Usual(rows=DirectOutput.ALL_ROWS),
    "broadcast": Usual(root="root_rank"),
    "alltoall": Usual(rows=DirectOutput.SAME_ROWS),
    "reducescatter": Usual((Average, Sum), rows=DirectOutput.PART_ROWS),
    "reduce": Usual(_REDUCTIONS, root="root_rank"),
    "gather": Usual(root="root_rank", rows=DirectOutput.ROOT_ROWS),
    "scatter": Usual(root="root_rank", rows=DirectOutput.CORE_ROWS),
    "send": Usual(root="dest", has_tag=True),
    "recv": Usual(root="source", has_tag=True),
}


def direct(
    adapter: DocumentedAdapter,
    spec: OpSpec,
    in_place: bool,
    blocking: bool,
    function: Any,
    grouped: bool = False,
) -> DirectFunction | None:
    """A callable that does the same as a public function on tensors, by one call of the core in the usual case. None if
    there is none."""
    how, usual = adapter.direct, _USUAL[spec.name]
    if how is None or (usual.rows is not None and (grouped or not blocking)):
        return None
    return DirectFunction(
        function,
        context.direct,
        _fail,
        f"{spec.name}.",
        spec.code,
        **how._asdict(),
        collect=None if usual.rows is None else functools.partial(_collect, adapter),
        takes=Takes.GROUP if grouped else Takes.TENSOR,
        output=_output(spec, usual, in_place),
        reductions=sum(1 << op for op in usual.reductions),
        root=usual.root,
        has_tag=usual.has_tag,
        blocks=blocking,
    )


def _output(spec: OpSpec, usual: Usual, in_place: bool) -> DirectOutput:
    if usual.rows is not None:
        return usual.rows
    if spec.output is Output.NONE:
        return DirectOutput.NONE
    overwrites = in_place or spec.output is Output.INPUT
    return DirectOutput.INPUT if overwrites else DirectOutput.LIKE_INPUT


def direct_barrier(function: Function) -> Function:
    """The same for ``barrier``, which takes no tensor."""
    made = DirectFunction(
        function, context.direct, _fail, "barrier.", Op.BARRIER, takes=Takes.NOTHING, blocks=True
    )
    return cast(Function, functools.update_wrapper(made, function))


def _collect(
    adapter: Adapter, engine: Engine, handle: int, tensor: Tensor, output: Tensor | None
) -> Tensor:
    """The result of an operation that is done: ``output`` (None: there is none), unless the core has allocated memory
    for it."""
    try:
        result = engine.result(handle, 0, 0)
    except Error as error:
        raise exception(error) from None
    in_output = result.memory is None and output is not None
    return output if in_output else _tensor_of(adapter, result, tensor)


def _tensor_of(adapter: Adapter, result: Result, like: Tensor) -> Tensor:
    """A tensor over memory that the core has allocated for a result. ``like``: this rank's input."""
    return adapter.from_memory(result.memory, like, (result.rows, *like.shape[1:]))


def _fail(error: Error) -> None:
    raise _failure(error)


def _failure(error: Error) -> ValueError | HorovodInternalError:
    """The exception for an operation that the core refused, or that failed in a call that waits briefly."""
    failure = exception(error)
    if isinstance(failure, HorovodInternalError):
        context.waited()
    return failure


def _free_name(spec: OpSpec, call: Call) -> str | None:
    """The name for the core. Raises ValueError if it is in flight."""
    name = spec.wire_name(call.name)
    if name is not None:
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
        spec.check_bool(call.reduce_op)
    if spec.min_ndim:
        for _, _, _, shape, _ in described:
            spec.check_ndim(len(shape))
    if call.splits is not None:
        counts = adapter.to_counts(call.splits)
        call = call._replace(splits=counts)
        # As in Horovod, rows beyond the splits are not sent.
        described = [
            (tensor, code, address, (min(sum(counts), shape[0]), *shape[1:]), device)
            for tensor, code, address, shape, device in described
        ]

    inputs = [tensor for tensor, _, _, _, _ in described]
    device = described[0][4]
    stream = 0 if device == CPU else adapter.stream(device, inputs)
    outputs: list[Tensor] | None
    if spec.output is Output.ROWS:
        outputs = None
        arguments = [(address, 0, shape) for _, _, address, shape, _ in described]
    elif spec.output is Output.NONE:
        outputs = [None] * len(inputs)
        arguments = [(address, 0, shape) for _, _, address, shape, _ in described]
    elif in_place:
        outputs = inputs
        arguments = [(address, address, shape) for _, _, address, shape, _ in described]
    else:
        made = [adapter.empty_like(tensor) for tensor in inputs]
        outputs = [tensor for tensor, _ in made]
        arguments = [
            (address, target, shape)
            for (_, _, address, shape, _), (_, target) in zip(described, made, strict=True)
        ]

    name = _free_name(spec, call)
    operation = Operation(engine, adapter, spec, inputs, outputs, grouped, device, stream)
    if in_place and any(i is not t for i, t in zip(inputs, tensors, strict=True)):
        operation.targets = tensors
    try:
        start = engine.perform if blocking else engine.submit
        operation.handle = start(
            spec.code,
            code,
            arguments,
            name,
            call.reduce_op,
            call.root,
            call.prescale,
            call.postscale,
            call.splits,
            call.process_set,
            call.wire_dtype,
            call.tag,
            call.layout,
            device,
            stream,
        )
    except Error as error:
        context.operations.pop(operation.number, None)
        raise _failure(error) from None
    except Exception:  # an argument of a wrong type
        context.operations.pop(operation.number, None)
        checked(spec, call)  # raises an error that names it
        raise
    if name:
        context.submitted(call.process_set, name)
    return operation


def _submit_split(
    engine: Engine,
    adapter: Adapter,
    spec: OpSpec,
    tensors: Sequence[Tensor],
    described: list[Described],
    call: Call,
    in_place: bool,
) -> SplitGroup:
    if not described:
        raise ValueError(f"grouped_{spec.name} needs at least one tensor")
    keys = [(code, device) for _, code, _, _, device in described]
    several_devices = len({device for _, device in keys}) > 1

    def label(key: tuple[int, int]) -> str:
        code, device = key
        return f"{dtypes.NAMES[code]}{'.gpu' if several_devices and device != CPU else ''}"

    parts = split_group(call.name, keys, label)
    operations = [
        _submit(
            engine,
            adapter,
            spec,
            part.select(tensors),
            part.select(described),
            call._replace(name=part.name),
            True,
            in_place,
        )
        for part in parts
    ]
    return SplitGroup(parts, operations)
