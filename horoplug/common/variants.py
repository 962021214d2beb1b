"""Makes the public functions: every variant of every row of the table of operations, for any framework.

``operations(adapter)`` gives ``allreduce``, ``allreduce_async``, ``allreduce_``, ``allreduce_async_``,
``grouped_allreduce`` … with Horovod's signatures. :func:`synchronize`, :func:`poll`, :func:`barrier` and :func:`join`
know no tensors and are the same everywhere.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from horoplug._native import Error
from horoplug.common.compression import pack
from horoplug.common.context import context
from horoplug.common.ops import Adapter, perform, submit
from horoplug.common.opspec import BARRIER, OPERATIONS, OpSpec
from horoplug.common.process_sets import ProcessSet, global_process_set, set_number
from horoplug.common.status import await_value, exception

Function = Callable[..., Any]
# What a variant does with (tensors, positional options, keyword options).
Action = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any]


def operations(adapter: Adapter, module: str) -> dict[str, Function]:
    """The functions by name. ``module``: the one that will hold them."""
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
    """Wait for an ``_async`` operation and return its output (a list for a group, (output, received splits) for
    alltoall); frees the handle. A handle that is unknown, or was synchronised before, gives None.

    Raises HorovodInternalError, with what went wrong and at which rank, if the operation failed."""
    operation = context.find(handle)
    return None if operation is None else operation.wait()


def poll(handle: int) -> bool:
    """Whether an ``_async`` operation is done, well or badly: :func:`synchronize` will not block. True for a handle
    that is unknown or was synchronised before."""
    operation = context.find(handle)
    return True if operation is None else operation.done()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set is here."""
    engine = context.engine()
    try:
        await_value(engine, engine.perform(BARRIER, 0, (), process_set=set_number(process_set)))
        context.waited()
    except Error as error:
        raise exception(error) from None


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until every rank of the set has; returns the (global) rank that was
    the last.

    Until then this rank takes part in what the others do without changing their results: in allreduce and
    reducescatter with the neutral element of the reduction (Average still divides by the number of all ranks), in
    allgather with no rows, in broadcast as one who receives. Errors for the others, as HorovodInternalError, are: a
    broadcast from a rank that has joined, an alltoall with rows for it, and process sets that come or go.

    ``device`` is accepted for Horovod's sake. Raises ValueError for an operation on the set that another thread
    submits meanwhile."""
    engine = context.engine()
    try:
        last = await_value(engine, engine.join(set_number(process_set)))
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
    if not blocking:
        run = _starting(adapter, spec, grouped, in_place)
    elif in_place:
        run = _waiting(adapter, spec, grouped)
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
    options = spec.options

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        return submit(adapter, spec, tensors, options(*args, **kwargs), grouped, in_place).number

    return run


def _waiting(adapter: Adapter, spec: OpSpec, grouped: bool) -> Action:
    options = spec.options

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return perform(adapter, spec, tensors, options(*args, **kwargs), grouped, True)

    return run


def _running(adapter: Adapter, spec: OpSpec, grouped: bool) -> Action:
    options = spec.options

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = options(*args, **kwargs)
        result = adapter.run(spec, tensors, call, grouped)
        return result[0] if spec.received_splits and call.splits is None else result

    return run


def _compressing(adapter: Adapter, spec: OpSpec, grouped: bool) -> Action:
    options, at, none = spec.options, spec.compression_at, adapter.compression
    assert at is not None

    def run(tensors: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > at:
            compression, args = args[at], args[:at] + args[at + 1 :]
        else:
            compression = kwargs.pop("compression", none)
        call = options(*args, **kwargs)
        if compression is none:
            return adapter.run(spec, tensors, call, grouped)
        packed, wire, unpack = pack(compression, tensors, spec.casts)
        result = adapter.run(spec, packed, call._replace(wire_dtype=wire), grouped)
        unpacked = unpack(result if grouped else [result])
        return unpacked if grouped else unpacked[0]

    return run


def _signature(
    adapter: Adapter, spec: OpSpec, grouped: bool, blocking: bool, compressing: bool
) -> inspect.Signature:
    tensor = adapter.tensor_type
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = list(inspect.signature(spec.options).parameters.values())
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
        if spec.received_splits:
            returns = tensor | tuple[tensor, tensor]  # type: ignore[valid-type]
    return inspect.Signature([first, *parameters], return_annotation=returns)


def _document(adapter: Adapter, spec: OpSpec, grouped: bool, in_place: bool, blocking: bool) -> str:
    text = [spec.does]
    if grouped:
        text.append("Takes a list of tensors, which are done together or not at all.")
    what = "list of outputs" if grouped else "output"
    if in_place:
        text.append("The result is written over the input.")
    if blocking:
        text.append(f"Blocks until done and returns the {what}.")
    else:
        text.append(
            "Returns a handle at once; synchronize(handle) waits for it and gives the output."
        )
        text.append("The tensors must not be changed in between.")
    text.append("")
    text.append(
        "`name` pairs the calls of the ranks; without one, the n-th call of a kind on each rank is."
    )
    text.append("")
    text.append("Raises ValueError and TypeError for wrong arguments, HorovodInternalError if the")
    text.append("ranks disagree or one of them is gone.")
    return "\n".join(text)
