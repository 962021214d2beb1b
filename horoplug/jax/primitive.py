"""The operations as JAX knows them: one primitive, with its rules for tracing and compiling. (How it is differentiated
and vmapped: :mod:`horoplug.jax.rules`.)"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call, Output
from horoplug.common.process_sets import process_set_by_id
from horoplug.jax import adapter
from horoplug.jax.library import PLATFORMS, TARGET, TRACED, ffi_lowering
from horoplug.jax.order import EFFECT, TOKEN

collective_p = Primitive("horoplug_collective")
collective_p.multiple_results = True


class Place(NamedTuple):
    """This rank's place in a process set, for operations whose outputs depend on it: a compiled program then refuses to
    run in another place."""

    size: int = 0  # of the set; 0: does not matter
    number: int = 0  # in it
    rows: int = -1  # the first dimension of the output, unless it follows from the rest


def place_in(process_set: int, rows: int = -1) -> Place:
    """Where this rank is now. Raises ValueError if it is not in the set."""
    context.mesh()  # raises NotInitializedError
    ranks = process_set_by_id(process_set)
    size, number = ranks.size(), ranks.rank()
    if size is None or number is None:
        raise ValueError(f"this rank is not in {ranks}.")
    TRACED.has_sets |= process_set != 0
    return Place(size, number, rows)


def run(operation: str, arrays: Sequence[Any], call: Call, place: Place | None = None) -> list[Any]:
    """An operation (a row of ``horoplug.common.opspec``) on arrays of one dtype, which are done together or not at all.
    The outputs' shapes are fixed now: ranks that have other shapes get an error when it runs."""
    if place is None:
        has_rows = BY_NAME[operation].output is Output.ROWS
        place = place_in(call.process_set) if has_rows else Place()
    outputs: list[Any] = collective_p.bind(*arrays, operation=operation, call=call, place=place)
    return outputs


def output_shape(
    operation: str, shape: tuple[int, ...], call: Call, place: Place
) -> tuple[int, ...]:
    """The shape of the output for that of an input."""
    if BY_NAME[operation].output is not Output.ROWS:
        return shape
    rows, rest = (shape[0], shape[1:]) if shape else (1, ())
    if place.rows >= 0:
        return (place.rows, *rest)
    if operation == "allgather":
        return (rows * place.size, *rest)
    if operation == "reducescatter":
        share, more = divmod(rows, place.size)
        return (share + (place.number < more), *rest)
    if call.splits is None:
        if rows % place.size:
            raise ValueError(
                "alltoall without splits needs a first dimension that is a multiple of the number of ranks: "
                f"{rows} is not a multiple of {place.size}; give splits."
            )
        return shape
    return (call.splits[place.number] * place.size, *rest)


def abstract(
    *arrays: Any, operation: str, call: Call, place: Place, **_: Any
) -> tuple[list[Any], set[Any]]:
    """What the operation gives, and its effect."""
    outputs = [ShapedArray(output_shape(operation, a.shape, call, place), a.dtype) for a in arrays]
    return outputs, {EFFECT}


def _run_now(*arrays: Any, operation: str, call: Call, place: Place) -> list[Any]:
    """On concrete arrays, while they are differentiated or vmapped."""
    outputs = [output for output, _ in adapter.perform(operation, arrays, call)]
    for array, output in zip(arrays, outputs, strict=True):
        expected = output_shape(operation, array.shape, call, place)
        if output.shape != expected:
            raise ValueError(
                f"{operation}: to be differentiated, all ranks must have arrays of one shape; the output has the shape "
                f"{output.shape}, not {expected}."
            )
    return outputs


def _lower(
    ctx: Any,
    *operands: Any,
    operation: str,
    call: Call,
    place: Place,
    on_card: bool,
    ticket: int = 0,
) -> Any:
    # These overwrite their operands; XLA copies what somebody else still needs.
    is_in_place = BY_NAME[operation].output is Output.LIKE_INPUT
    aliases = {1 + i: 1 + i for i in range(len(operands))} if is_in_place else {}
    rule = ffi_lowering(TARGET, has_side_effect=True, operand_output_aliases=aliases)
    with_token = ctx.replace(avals_in=[TOKEN, *ctx.avals_in], avals_out=[TOKEN, *ctx.avals_out])
    token, *outputs = rule(
        with_token,
        ctx.tokens_in.get(EFFECT),
        *operands,
        operation=np.int64(BY_NAME[operation].code),
        name=f"{operation}.{call.name}" if call.name else "",
        reduce_op=np.int64(call.reduce_op),
        root=np.int64(call.root),
        prescale=np.float64(call.prescale),
        postscale=np.float64(call.postscale),
        wire_dtype=np.int64(call.wire_dtype),
        process_set=np.int64(call.process_set),
        splits=np.array(call.splits or (), np.int64),
        size=np.int64(place.size),
        place=np.int64(place.number),
        # 0: of output rows there are as many as the program says, from whichever ranks.
        is_even=np.int64(place.rows < 0 and operation != "reducescatter"),
        on_card=np.int64(on_card),
        ticket=np.int64(ticket),
    )
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return outputs


def _lower_elsewhere(ctx: Any, *operands: Any, operation: str, **_: Any) -> Any:
    raise NotImplementedError(
        f"{operation} inside of jax.jit runs on CPUs and on NVIDIA's GPUs: call it outside of jax.jit, where arrays "
        "pass through the host's memory, or set JAX_PLATFORMS=cpu."
    )


def register(primitive: Primitive) -> None:
    """Say how a primitive that does an operation is compiled. Beside the parameters of :data:`collective_p` it may have
    ``ticket`` (see :mod:`horoplug.jax.cards`)."""
    mlir.register_lowering(primitive, _lower_elsewhere)
    for platform in PLATFORMS:
        rule = functools.partial(_lower, on_card=platform != "cpu")
        mlir.register_lowering(primitive, rule, platform=platform)


collective_p.def_effectful_abstract_eval(abstract)
collective_p.def_impl(_run_now)
register(collective_p)
