"""Makes the public functions of a framework: every variant of every operation in the table.

``operations(adapter)`` returns ``allreduce``, ``allreduce_async``, ``allreduce_``, ``allreduce_async_``,
``grouped_allreduce`` and so on, with Horovod's signatures. :func:`synchronize`, :func:`poll`, :func:`barrier` and
:func:`join` take no tensors and are the same in every framework.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from horoplug._native import Error, Op
from horoplug.common.calls import CALLS
from horoplug.common.compression import pack
from horoplug.common.context import context
from horoplug.common.ops import Adapter, perform, submit
from horoplug.common.opspec import OPERATIONS, OpSpec, Output
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.status import await_value, exception

Function = Callable[..., Any]
# What a variant does with (tensors, positional options, keyword options).
Action = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any]


def operations(adapter: Adapter, module: str) -> dict[str, Function]:
    """The functions by name. ``module``: name of the module that will hold them."""
    made = {}
    for spec in OPERATIONS:
        for grouped in (False, True) if spec.grouped else (False,):
            for in_place in (False, True) if spec.in_place else (False,):
                for blocking in (True, False):
                    function = _variant(adapter, spec, grouped, in_place, blocking)
                    function.__module__ = module
                    made[function.__name__] = function
    return made


def synchronize(handle: int) -> Any:
    """Wait for an ``_async`` operation and return its output: a list for a group, (output, received splits) for
    alltoall. Frees the handle. Returns None for a handle that is unknown or was synchronized before.

    Raises HorovodInternalError, which names the cause and the rank, if the operation failed."""
    operation = context.find(handle)
    return None if operation is None else operation.wait()


def poll(handle: int) -> bool:
    """Whether an ``_async`` operation is done, successfully or not: :func:`synchronize` then does not block. True for a
    handle that is unknown or was synchronized before."""
    operation = context.find(handle)
    return True if operation is None else operation.done()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called this. Raises HorovodInternalError if one cannot."""
    engine = context.engine()
    try:
        await_value(
            engine, engine.perform(Op.BARRIER, 0, (), process_set=process_set_id(process_set))
        )
        context.waited()
    except Error as error:
        raise exception(error) from None


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Declare that this rank has no more data, and wait until every rank of the set has joined. Returns the global rank
    that joined last.

    Until then this rank takes part in the operations of the others without changing their results: in allreduce and
    reducescatter with the identity element of the reduction (Average still divides by the number of all ranks), in
    allgather with no rows, in broadcast as a receiver. The other ranks get HorovodInternalError for a broadcast from a
    rank that has joined, for an alltoall with rows for it, and for adding or removing process sets.

    ``device`` is accepted for compatibility with Horovod and ignored. Raises ValueError if another thread submits an
    operation on the set meanwhile."""
    engine = context.engine()
    try:
        last = await_value(engine, engine.join(process_set_id(process_set)))
        context.waited()
        return last
    except Error as error:
        raise exception(error) from None


def _variant(
    adapter: Adapter, spec: OpSpec, grouped: bool, in_place: bool, blocking: bool
) -> Function:
    compressing = (
        blocking
        and not in_place
        and spec.compression_at is not None
        and adapter.compression is not None
    )
    overwrites = in_place or spec.output is Output.INPUT
    if not blocking:
        run = _starting(adapter, spec, grouped, overwrites)
    elif overwrites or spec.output is Output.NONE:
        run = _waiting(adapter, spec, grouped, overwrites)
    elif compressing:
        run = _compressing(adapter, spec, grouped)
    else:
        run = _running(adapter, spec, grouped)

    name = f"{spec.name}{'' if blocking else '_async'}{'_' if in_place else ''}"
    function: Any
    if grouped:
        name = f"grouped_{name}"

        def of_list(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensors, (list, tuple)):  # a tensor would be taken row by row
                raise TypeError(f"{name} takes a list of tensors, got {type(tensors).__name__}.")
            return run(tensors, args, kwargs)

        function = of_list
    else:

        def of_one(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return run((tensor,), args, kwargs)

        function = of_one

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _document(adapter, spec, grouped, in_place, blocking)
    signature = _signature(adapter, spec, grouped, blocking, compressing)
    function.__signature__ = signature
    function.__annotations__ = {
        "return": signature.return_annotation,
        **{p.name: p.annotation for p in signature.parameters.values()},
    }
    return cast(Function, function)


def _starting(adapter: Adapter, spec: OpSpec, grouped: bool, in_place: bool) -> Action:
    options = CALLS[spec.name]

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        return submit(adapter, spec, tensors, options(*args, **kwargs), grouped, in_place).number

    return run


def _waiting(adapter: Adapter, spec: OpSpec, grouped: bool, in_place: bool) -> Action:
    options = CALLS[spec.name]

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return perform(adapter, spec, tensors, options(*args, **kwargs), grouped, in_place)

    return run


def _running(adapter: Adapter, spec: OpSpec, grouped: bool) -> Action:
    options = CALLS[spec.name]

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = options(*args, **kwargs)
        result = adapter.run(spec, tensors, call, grouped)
        return result[0] if spec.received_splits and call.splits is None else result

    return run


def _compressing(adapter: Adapter, spec: OpSpec, grouped: bool) -> Action:
    options, at, none = CALLS[spec.name], spec.compression_at, adapter.compression
    assert at is not None

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > at:
            compression, args = args[at], args[:at] + args[at + 1 :]
        else:
            compression = kwargs.pop("compression", none)
        call = options(*args, **kwargs)
        if compression is none:
            return adapter.run(spec, tensors, call, grouped)
        packed = pack(compression, tensors, spec.casts)
        call = call._replace(wire_dtype=packed.wire_dtype)
        result = adapter.run(spec, packed.tensors, call, grouped)
        unpacked = packed.unpack(result if grouped else [result])
        return unpacked if grouped else unpacked[0]

    return run


def _signature(
    adapter: Adapter, spec: OpSpec, grouped: bool, blocking: bool, compressing: bool
) -> inspect.Signature:
    tensor = adapter.tensor_type
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = list(inspect.signature(CALLS[spec.name]).parameters.values())
    if compressing:
        assert spec.compression_at is not None
        compression = inspect.Parameter(
            "compression", kind, default=adapter.compression, annotation=Any
        )
        parameters.insert(spec.compression_at, compression)
    first = (
        inspect.Parameter("tensors", kind, annotation=Sequence[tensor])  # type: ignore[valid-type]
        if grouped
        else inspect.Parameter("tensor", kind, annotation=tensor)
    )
    returns: Any = int
    if blocking:
        returns = list[tensor] if grouped else tensor  # type: ignore[valid-type]
        if spec.output is Output.NONE:
            returns = None
        if spec.received_splits:
            returns = tensor | tuple[tensor, tensor]  # type: ignore[valid-type]
    return inspect.Signature([first, *parameters], return_annotation=returns)


def _document(adapter: Adapter, spec: OpSpec, grouped: bool, in_place: bool, blocking: bool) -> str:
    text = [spec.summary]
    if grouped:
        text.append("Takes a list of tensors; either all of them are processed or none is.")
    what = "list of outputs" if grouped else "output"
    if in_place or spec.output is Output.INPUT:
        text.append("Overwrites the input with the result.")
    if blocking:
        has_output = spec.output is not Output.NONE
        text.append(f"Blocks until done{f' and returns the {what}' if has_output else ''}.")
    else:
        text.append("Returns a handle at once; synchronize(handle) waits and returns the output.")
        text.append("The tensors must not be changed in between.")
    text.append("")
    if spec.collective:
        text.append(
            "`name` pairs the calls of the ranks. Without a name, the n-th call of an operation on each rank is paired."
        )
    else:
        text.append("`name` appears in error messages and timelines only.")
    text.append("")
    text.append(
        "Raises ValueError and TypeError for wrong arguments, HorovodInternalError if the ranks"
    )
    text.append("disagree or a rank has failed.")
    return "\n".join(text)
