"""The JAX primitive that represents every operation: binding, shape inference and lowering to an XLA custom call.

Differentiation and batching are in :mod:`horoplug.jax.rules`, execution on concrete arrays in
:mod:`horoplug.jax.eager`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from horoplug.common.arguments import checked
from horoplug.common.context import context
from horoplug.common.opspec import BY_NAME, Call, Output
from horoplug.common.process_sets import process_set_by_id
from horoplug.jax.library import PLATFORMS, TARGET, TRACED, ffi_lowering
from horoplug.jax.order import EFFECT, TOKEN

collective_p = Primitive("horoplug_collective")
collective_p.multiple_results = True


class SetPosition(NamedTuple):
    """This rank's position in a process set, for operations whose output shapes depend on it.

    A compiled program contains the position that was current when it was traced. It raises an error if it runs on a
    rank with another position."""

    size: int = 0  # number of ranks in the set; 0: the output shapes do not depend on the position
    rank: int = 0  # in the set
    rows: int = -1  # first dimension of the output; -1: follows from the other values


def position_in(process_set: int, rows: int = -1) -> SetPosition:
    """The current position of this rank. Raises ValueError if the rank is not in the set."""
    context.connections()  # raises NotInitializedError
    members = process_set_by_id(process_set)
    size, rank = members.size(), members.rank()
    if size is None or rank is None:
        raise ValueError(f"this rank is not in {members}")
    TRACED.has_sets |= process_set != 0
    return SetPosition(size, rank, rows)


def bind(
    operation: str, arrays: Sequence[Any], call: Call, position: SetPosition | None = None
) -> list[Any]:
    """Apply an operation (a row of ``horoplug.common.opspec``) to arrays of one dtype, which succeed or fail together.

    The output shapes are fixed here. Ranks whose shapes differ get an error when the operation runs."""
    call = checked(BY_NAME[operation], call)
    if position is None:
        has_rows = BY_NAME[operation].output is Output.ROWS
        position = position_in(call.process_set) if has_rows else SetPosition()
    outputs: list[Any] = collective_p.bind(
        *arrays, operation=operation, call=call, position=position
    )
    return outputs


def output_shape(
    operation: str, shape: tuple[int, ...], call: Call, position: SetPosition
) -> tuple[int, ...]:
    """The shape of the output for an input of a given shape."""
    if BY_NAME[operation].output is not Output.ROWS:
        return shape
    rows, rest = (shape[0], shape[1:]) if shape else (1, ())
    if position.rows >= 0:
        return (position.rows, *rest)
    if operation == "allgather":
        return (rows * position.size, *rest)
    if operation == "reducescatter":
        share, remainder = divmod(rows, position.size)
        return (share + (position.rank < remainder), *rest)
    if call.splits is None:
        if rows % position.size:
            raise ValueError(
                "alltoall without splits needs a first dimension that is a multiple of the number of ranks: "
                f"{rows} is not a multiple of {position.size}; give splits"
            )
        return shape
    return (call.splits[position.rank] * position.size, *rest)


def abstract_eval(
    *arrays: Any, operation: str, call: Call, position: SetPosition, **_: Any
) -> tuple[list[Any], set[Any]]:
    """Shapes and dtypes of the outputs, and the effect that orders operations."""
    outputs = [
        ShapedArray(output_shape(operation, a.shape, call, position), a.dtype) for a in arrays
    ]
    return outputs, {EFFECT}


def _lower(
    ctx: Any,
    *operands: Any,
    operation: str,
    call: Call,
    position: SetPosition,
    on_gpu: bool,
    eager_call: int = 0,
) -> Any:
    # Operations whose outputs have the inputs' shapes overwrite their operands; XLA copies an operand that is
    # still needed.
    spec = BY_NAME[operation]
    is_in_place = spec.output is Output.LIKE_INPUT
    aliases = {1 + i: 1 + i for i in range(len(operands))} if is_in_place else {}
    rule = ffi_lowering(TARGET, has_side_effect=True, operand_output_aliases=aliases)
    with_token = ctx.replace(avals_in=[TOKEN, *ctx.avals_in], avals_out=[TOKEN, *ctx.avals_out])
    token, *outputs = rule(
        with_token,
        ctx.tokens_in.get(EFFECT),
        *operands,
        operation=np.int64(spec.code),
        name=spec.wire_name(call.name) or "",
        reduce_op=np.int64(call.reduce_op),
        root=np.int64(call.root),
        prescale=np.float64(call.prescale),
        postscale=np.float64(call.postscale),
        wire_dtype=np.int64(call.wire_dtype),
        process_set=np.int64(call.process_set),
        splits=np.array(call.splits or (), np.int64),
        size=np.int64(position.size),
        rank=np.int64(position.rank),
        # Whether every rank must contribute the same number of rows. Otherwise only the total is checked.
        equal_rows=np.int64(position.rows < 0 and operation != "reducescatter"),
        on_gpu=np.int64(on_gpu),
        eager_call=np.int64(eager_call),
    )
    ctx.set_tokens_out(mlir.TokenSet({EFFECT: token}))
    return outputs


def _lower_unsupported(ctx: Any, *operands: Any, operation: str, **_: Any) -> Any:
    raise NotImplementedError(
        f"{operation} inside of jax.jit runs on CPUs and on NVIDIA GPUs only: call it outside of jax.jit, where arrays "
        "pass through the host's memory, or set JAX_PLATFORMS=cpu"
    )


def register_lowering(primitive: Primitive) -> None:
    """Register the lowering rules of a primitive that runs an operation.

    The primitive has the parameters of :data:`collective_p`, and optionally ``eager_call`` (see
    :mod:`horoplug.jax.gpu`)."""
    mlir.register_lowering(primitive, _lower_unsupported)
    for platform in PLATFORMS:
        rule = functools.partial(_lower, on_gpu=platform != "cpu")
        mlir.register_lowering(primitive, rule, platform=platform)


collective_p.def_effectful_abstract_eval(abstract_eval)
register_lowering(collective_p)
