"""The table of operations: one row each. :mod:`horoplug.common.ops` makes every variant of every row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from horoplug.common.process_sets import ProcessSet, global_process_set, set_number
from horoplug.common.reduce_ops import NAMES, Adasum, Average, Sum, check_ranks, resolve


class Call(NamedTuple):
    """What a user asks of one operation: the arguments of ``Engine.submit`` that follow the tensors, in its order."""

    name: str | None = None
    reduce_op: int = Average
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: Sequence[int] | None = None
    process_set: int = 0
    wire_dtype: int = 0  # allreduce: the code of what float32 travels as; 0: as it is


class Output(Enum):
    """Where the result of an operation goes."""

    LIKE_INPUT = "a tensor of the input's shape"
    ROWS = "memory of the core: the other ranks decide how many rows (first dimension) there are"


@dataclass(frozen=True)
class OpSpec:
    """One operation, the same in every framework.

    ``options`` has the signature of the operation after the tensor, and turns the arguments into a :class:`Call`."""

    name: str
    code: int  # hp_op of the C ABI
    options: Callable[..., Call]
    output: Output
    does: str  # the first sentence of the documentation
    grouped: bool = False  # has grouped_ variants
    in_place: bool = False  # has variants that overwrite their input: a trailing underscore
    reduces: bool = False  # computes with the elements
    least_ndim: int = 0
    received_splits: bool = False  # the result is (output, rows received from each rank)
    # Place of the argument `compression` in the blocking, out-of-place variants, in frameworks that compress.
    compression_at: int | None = None
    casts: bool = False  # the core compresses on its own what it can: Call.wire_dtype


# The options of each operation: its signature after the tensor. (They have the operation's name because it appears in
# Python's own messages about wrong arguments.)


def allreduce(
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call:
    number = set_number(process_set)
    reduce_op = resolve(op, average)
    if reduce_op == Adasum:
        check_ranks(reduce_op, process_set.size())
    return Call(name, reduce_op, 0, prescale_factor, postscale_factor, None, number)


def allgather(name: str | None = None, process_set: ProcessSet = global_process_set) -> Call:
    return Call(name, process_set=set_number(process_set))


def broadcast(
    root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, root=root_rank, process_set=set_number(process_set))


def alltoall(
    splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    return Call(name, splits=splits, process_set=set_number(process_set))


def reducescatter(
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call:
    if resolve(op) not in (Average, Sum):
        # Horovod's users catch a RuntimeError where Adasum is not to be had.
        kind = NotImplementedError if op == Adasum else ValueError
        raise kind(f"reducescatter knows op=Average and op=Sum, not {NAMES[op]}.")
    number = set_number(process_set)
    return Call(name, op, 0, prescale_factor, postscale_factor, None, number)


OPERATIONS: Final = (
    OpSpec(
        "allreduce",
        0,
        allreduce,
        Output.LIKE_INPUT,
        "Reduce tensors of one shape over all ranks, element by element; every rank gets the result.",
        grouped=True,
        in_place=True,
        reduces=True,
        compression_at=2,
        casts=True,
    ),
    OpSpec(
        "allgather",
        1,
        allgather,
        Output.ROWS,
        "Join the ranks' tensors along the first dimension, which may differ between ranks, in rank order; a scalar "
        "counts as one row.",
        grouped=True,
    ),
    OpSpec(
        "broadcast",
        2,
        broadcast,
        Output.LIKE_INPUT,
        "Give every rank the tensor of rank `root_rank` (a global rank); shapes are the same on all ranks.",
        in_place=True,
    ),
    OpSpec(
        "alltoall",
        3,
        alltoall,
        Output.ROWS,
        "Send `splits[i]` rows (first dimension) to rank i, taken in order, and join what arrives in rank order; "
        "rows beyond the splits stay here. Without `splits`, equal parts. Given `splits`, the result is "
        "(output, rows received from each rank); "
        "synchronize(alltoall_async(...)) always returns both.",
        least_ndim=1,
        received_splits=True,
    ),
    OpSpec(
        "reducescatter",
        4,
        reducescatter,
        Output.ROWS,
        "Reduce like allreduce (Average or Sum only), then keep this rank's share of the rows (first dimension); the "
        "first `rows % size` ranks get one more.",
        grouped=True,
        reduces=True,
        least_ndim=1,
        compression_at=1,
    ),
)
BY_NAME: Final = {spec.name: spec for spec in OPERATIONS}
BARRIER: Final = 5  # has no tensors, hence no variants and no row
