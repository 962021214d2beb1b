"""Makes the public functions of a framework: every variant of every operation in the table.

``operations(adapter)`` returns ``allreduce``, ``allreduce_async``, ``allreduce_``, ``allreduce_async_``,
``grouped_allreduce`` and so on, with Horovod's signatures. :func:`synchronize`, :func:`poll`, :func:`barrier` and
:func:`join` take no tensors and are the same in every framework.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, cast

from horoplug._native import Error, Op
from horoplug.common.calls import CALLS
from horoplug.common.compression import AnyCompressor, pack
from horoplug.common.context import context
from horoplug.common.in_flight import Waitable
from horoplug.common.ops import Adapter, DocumentedAdapter, direct, direct_barrier, perform, submit
from horoplug.common.opspec import OPERATIONS, OpSpec, Output
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.status import await_value, exception

Function = Callable[..., Any]
# What a variant does with (tensors, positional options, keyword options).
Action = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any]

_DOCUMENTED: Final = {
    "average": "deprecated; True means op=Average, False means op=Sum.",
    "compression": "Compression.none, .fp16 or .bf16, or a class with the methods compress and decompress.",
    "op": "the reduction: {reductions}.",
    "prescale_factor": "each rank's tensor is multiplied by this factor before the reduction.",
    "postscale_factor": "the result is multiplied by this factor.",
    "name": "pairs the calls of the ranks. Without a name, the n-th call of an operation on each rank is paired.",
    "process_set": "the ranks that take part; by default all ranks of the job.",
}
"""The documentation of parameters that are not described in :attr:`OpSpec.summary`."""
_DOCUMENTED_POINT_TO_POINT: Final = {
    "name": "appears in error messages and timelines only.",
    "process_set": "a send matches only a recv in the same process set; by default the global one.",
}


def operations(adapter: DocumentedAdapter, module: str) -> dict[str, Function]:
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


def operation_of(function: str) -> str:
    """The name of the operation of which a function is a variant."""
    return function.removeprefix("grouped_").removesuffix("_").removesuffix("_async")


def synchronize(handle: int) -> Any:
    """Wait for an ``_async`` operation and return its output: a list for a group, (output, received splits) for
    alltoall. Frees the handle. Returns None for a handle that is unknown or was synchronized before.

    Raises HorovodInternalError, which names the cause and the rank, if the operation failed, and TypeError for what is
    not a handle.

    ``handle``: what a function with ``_async`` in its name has returned.

    Example, on two ranks:

        import horoplug as hvd

        handle = hvd.allreduce_async(np.array([1.0 + hvd.rank(), 2.0]), op=hvd.Sum)
        hvd.synchronize(handle)  # -> [3.0, 4.0]
    """
    operation = context.find(handle) if type(handle) is int else _find("synchronize", handle)
    return None if operation is None else operation.wait()


def poll(handle: int) -> bool:
    """Whether an ``_async`` operation is done, successfully or not: :func:`synchronize` then does not block. True for a
    ``handle`` that is unknown or was synchronized before.

    Raises TypeError for what is not a handle.

    Example, on two ranks:

        import horoplug as hvd

        handle = hvd.allreduce_async(np.array([1.0 + hvd.rank(), 2.0]), op=hvd.Sum)
        while not hvd.poll(handle):
            pass  # compute something else
        hvd.synchronize(handle)  # -> [3.0, 4.0]
    """
    operation = context.find(handle) if type(handle) is int else _find("poll", handle)
    return True if operation is None else operation.done()


def _find(function: str, handle: Any) -> Waitable | None:
    """The operation of a handle that is not an ``int``. ``function``: for the error. Raises TypeError."""
    # None stands for an operation that was not submitted, and a function for a sparse allreduce.
    if handle is None or callable(handle):
        return None
    if not isinstance(handle, Integral):
        raise TypeError(
            f"{function} takes a handle, which the functions with _async in their names return, got "
            f"{type(handle).__name__}"
        )
    return context.find(int(handle))


@direct_barrier
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called this function. ``process_set``: by default all ranks of the
    job.

    Raises NotInitializedError before ``init``, ValueError for a process set that is not registered, and
    HorovodInternalError if a rank has failed or the ranks wait for each other.

    Example, on two ranks:

        if hvd.rank() == 0:
            with open("data.txt", "w") as file:
                file.write("downloaded once")
        hvd.barrier()
        open("data.txt").read()  # -> "downloaded once"
    """
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

    Until then this rank takes part in the operations of the others without changing their results: in allreduce, reduce
    and reducescatter with the identity element of the reduction (Average still divides by the number of all ranks), in
    allgather and gather with no rows, in broadcast and scatter as a receiver. The other ranks get HorovodInternalError
    for an operation whose root has joined, for an alltoall with rows for a joined rank, and for adding or removing
    process sets.

    ``process_set``: by default all ranks of the job. ``device`` is accepted for compatibility with Horovod and ignored.
    Raises NotInitializedError before ``init``, ValueError if another thread submits an operation on the set meanwhile,
    and HorovodInternalError if a rank has failed.

    Example, on two ranks:

        import horoplug as hvd

        for batch in range(2 + hvd.rank()):  # rank 1 has more data
            hvd.allreduce(np.array([1.0]), name=f"batch {batch}", op=hvd.Sum)
        hvd.join()  # -> 1
    """
    engine = context.engine()
    try:
        last = await_value(engine, engine.join(process_set_id(process_set)))
        context.waited()
        return last
    except Error as error:
        raise exception(error) from None


def _variant(
    adapter: DocumentedAdapter, spec: OpSpec, grouped: bool, in_place: bool, blocking: bool
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
                raise TypeError(f"{name} takes a list of tensors, got {type(tensors).__name__}")
            return run(tensors, args, kwargs)

        function = of_list
    else:

        def of_one(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            return run((tensor,), args, kwargs)

        function = of_one

    function.__name__ = function.__qualname__ = name
    signature = _signature(adapter, spec, grouped, blocking, compressing)
    function.__doc__ = _document(adapter, spec, signature.parameters, grouped, in_place, blocking)
    function.__signature__ = signature
    function.__annotations__ = {
        "return": signature.return_annotation,
        **{p.name: p.annotation for p in signature.parameters.values()},
    }
    fast = direct(adapter, spec, in_place, blocking, function, grouped)
    return cast(Function, function if fast is None else functools.update_wrapper(fast, function))


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
            "compression", kind, default=adapter.compression, annotation=AnyCompressor
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


def _document(
    adapter: DocumentedAdapter,
    spec: OpSpec,
    parameters: Mapping[str, Any],
    grouped: bool,
    in_place: bool,
    blocking: bool,
) -> str:
    """The documentation of a variant, in lines of at most 96 characters: what it does, its parameters one by one, its
    exceptions and an example."""
    text = [spec.summary]
    if grouped:
        text.append("Takes a list of tensors, which succeed or fail together.")
    what = "list of outputs" if grouped else "output"
    if in_place or spec.output is Output.INPUT:
        text.append("Overwrites the input with the result.")
    if blocking:
        has_output = spec.output is not Output.NONE
        text.append(f"Blocks until done{f' and returns the {what}' if has_output else ''}.")
    else:
        waits = "waits" if spec.output is Output.NONE else f"waits and returns the {what}"
        text.append(f"Returns a handle at once; synchronize(handle) {waits}.")
        text.append("The tensors must not be changed in between.")
    about = adapter.documented
    tensors = "a list of tensors, each one" if grouped else f"{about.tensor},"
    documented = dict(_DOCUMENTED if spec.collective else _DOCUMENTED | _DOCUMENTED_POINT_TO_POINT)
    documented["tensors" if grouped else "tensor"] = (
        f"{tensors} {spec.takes}. Supported dtypes: {about.dtypes}."
    )
    lists = [
        _filled(f"``{each}``: {documented[each].format(reductions=spec.reductions)}", "    ")
        for each in parameters
        if each in documented
    ]
    failure = "HorovodInternalError if the ranks disagree or a rank has failed"
    raises = (
        "Raises NotInitializedError before init, and TypeError or ValueError for arguments that are invalid on this "
        "rank, such as an unsupported dtype or a name that is in flight. "
        + (
            f"Raises {failure}."
            if blocking
            else f"Raises HorovodInternalError if the job has ended; synchronize raises {failure}."
        )
    )
    example = _example(about.make, spec, grouped, in_place or spec.output is Output.INPUT, blocking)
    parts = [_filled(" ".join(text)), "\n".join(lists), _filled(raises), EXAMPLE, example]
    return "\n\n".join(parts)


EXAMPLE: Final = "Example, on two ranks:"


@functools.cache  # variants share most paragraphs
def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 96, subsequent_indent=indent)


def _example(make: str, spec: OpSpec, grouped: bool, overwrites: bool, blocking: bool) -> str:
    """Indented lines. ``make``: makes a tensor of a list."""
    example = spec.example
    options = f", {example.options}" if example.options else ""
    given = "[x, x]" if grouped else "x"
    if grouped and overwrites:
        given = "[x, y]"
    name = f"{'grouped_' if grouped else ''}{spec.name}{'' if blocking else '_async'}"
    name += "_" if overwrites and spec.output is not Output.INPUT else ""
    call = f"hvd.{name}({given}{options})"
    lines = [example.before] if example.before else []
    lines += [f"{each} = {{tensor}}({example.numbers})" for each in ("xy" if "y" in given else "x")]
    result = f"  # -> {_output(spec, grouped, blocking)}" if example.output else ""
    if blocking:
        lines.append(call + ("" if overwrites else result))
    else:
        lines += [f"handle = {call}", "hvd.synchronize(handle)" + ("" if overwrites else result)]
    if overwrites:
        lines.append(f"{given}{result}")
    lines += [example.after] if example.after else []
    return "\n".join(f"    {line.replace('{tensor}', make)}" for line in lines)


def _output(spec: OpSpec, grouped: bool, blocking: bool) -> str:
    """What a variant returns, or the tensors afterwards."""
    output = spec.example.output
    if grouped:
        return re.sub(r"(\[.*?\])", r"[\1, \1]", output)
    if spec.received_splits and not blocking:
        return re.sub(r"(\[.*?\])", r"(\1, [1, 1])", output)
    return output
