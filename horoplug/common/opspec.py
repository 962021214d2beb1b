"""The table of operations: one row each, as data. It imports nothing that needs a running job.

:mod:`horoplug.common.calls` has the signature of each operation, :mod:`horoplug.common.variants` makes every variant of
every row (``_async``, in place, grouped) for a framework."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from horoplug._native import Op
from horoplug.common.reduce_ops import Average


class Call(NamedTuple):
    """The options of one call, without its tensors: arguments of ``Engine.submit``."""

    name: str | None = None
    reduce_op: int = Average
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: Sequence[int] | None = None
    process_set: int = 0
    wire_dtype: int = 0  # allreduce: code of the dtype in which float32 is sent; 0: float32
    tag: int = 0  # send, recv
    layout: str | None = None  # what the tensors are parts of, in words


class Output(Enum):
    """How the shape and the memory of a result are determined."""

    LIKE_INPUT = "a tensor with the shape of the input, allocated by the caller"
    ROWS = (
        "memory of the core, since the number of rows (first dimension) depends on the other ranks"
    )
    INPUT = "the input itself, which is overwritten"
    NONE = "there is no result"


class Example(NamedTuple):
    """A call on two ranks, for the documentation. The texts are Python; ``{tensor}`` stands for the framework's
    function that makes a tensor of a list."""

    numbers: str  # this rank's tensor, as a list
    options: str  # further arguments
    output: str  # the output of both ranks, or "... on rank 0, ... on rank 1"
    before: str = ""  # a statement before the call
    after: str = ""  # a statement after it


@dataclass(frozen=True)
class OpSpec:
    """One operation, the same in every framework."""

    op: Op
    output: Output
    summary: str  # the first sentence of the documentation
    takes: str  # the shape and the dtype of an input, for the documentation
    example: Example
    grouped: bool = False  # has grouped_ variants
    in_place: bool = False  # has variants that overwrite their input: a trailing underscore
    reduces: bool = False  # combines elements with a reduction
    reductions: str = ""  # the values of the argument `op`, for the documentation
    min_ndim: int = 0  # smallest number of dimensions of an input
    received_splits: bool = False  # the result is (output, rows received from each rank)
    # Position of the argument `compression` in the blocking, out-of-place variants of frameworks that compress.
    compression_at: int | None = None
    casts: bool = False  # the core applies Call.wire_dtype
    collective: bool = True  # all ranks of the process set call it; False: two ranks do
    paired_as: str = ""  # the operation that begins the names on the wire, if it is another one
    name: str = field(init=False)
    code: int = field(init=False)  # hp_op of the C ABI
    caller_allocates: bool = field(init=False)  # the caller provides the memory of the result

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.op.name.lower())
        object.__setattr__(self, "code", int(self.op))
        allocates = self.output in (Output.LIKE_INPUT, Output.INPUT)
        object.__setattr__(self, "caller_allocates", allocates)

    def wire_name(self, name: str | None) -> str | None:
        """The name that pairs the calls of the ranks, which includes the operation: calls of different operations may
        have the same ``name``. None if the user gave none; the core then numbers the calls."""
        if type(name) is not str:  # a string, the usual case, costs no further call
            name = self.checked_name(name)
        return f"{self.paired_as or self.name}.{name}" if name else None

    def checked_name(self, name: str | None) -> str | None:
        """The name. Raises TypeError if it is not a string."""
        if name is None or isinstance(name, str):
            return name
        raise TypeError(f"{self.name}: name= takes a string, got {type(name).__name__}")

    def check_ndim(self, ndim: int) -> None:
        """Raises ValueError for an input with fewer dimensions than the operation needs."""
        if ndim < self.min_ndim:
            raise ValueError(f"{self.name} needs a first dimension to divide; a scalar has none")

    def check_bool(self, reduce_op: int) -> None:
        """Raises ValueError if the operation does not support ``reduce_op`` on tensors of bool."""
        if self.reduces and reduce_op == Average:
            raise ValueError(f"{self.name} of bool has no average; use op=Max (or) or op=Min (and)")


OPERATIONS: Final = (
    OpSpec(
        op=Op.ALLREDUCE,
        output=Output.LIKE_INPUT,
        summary="Reduce tensors of one shape over all ranks, element by element; every rank gets the result.",
        takes="of the same shape and dtype on all ranks, which are those of the result",
        example=Example("[1.0 + hvd.rank(), 2.0]", "op=hvd.Sum", "[3.0, 4.0]"),
        grouped=True,
        in_place=True,
        reduces=True,
        reductions="Average (the default), Sum, Adasum (for 2, 4, 8 ... ranks), Min, Max or Product",
        compression_at=2,
        casts=True,
    ),
    OpSpec(
        op=Op.ALLGATHER,
        output=Output.ROWS,
        summary="Concatenate the tensors of all ranks along the first dimension, in rank order. The size of that "
        "dimension may differ between ranks; a scalar counts as one row.",
        takes="of the same dtype on all ranks, with rows of the same shape",
        example=Example("[1.0 + hvd.rank()]", "", "[1.0, 2.0]"),
        grouped=True,
    ),
    OpSpec(
        op=Op.BROADCAST,
        output=Output.LIKE_INPUT,
        summary="Give every rank the tensor of rank `root_rank` (a global rank); shapes are the same on all ranks.",
        takes="of the same shape and dtype on all ranks",
        example=Example("[1.0 + hvd.rank(), 2.0]", "root_rank=0", "[1.0, 2.0]"),
        in_place=True,
    ),
    OpSpec(
        op=Op.ALLTOALL,
        output=Output.ROWS,
        summary="Send `splits[i]` rows (first dimension) to rank i of the set, taken in order, and concatenate the "
        "received rows in rank order. Rows beyond the splits are not sent. Without `splits`, all ranks get equal "
        "parts. With `splits` (integers, one for each rank), the result is (output, rows received from each rank as "
        "int32); synchronize(alltoall_async(...)) always returns both.",
        takes="of the same dtype on all ranks, with rows of the same shape",
        example=Example(
            "[10.0 * hvd.rank(), 10.0 * hvd.rank() + 1.0]",
            "",
            "[0.0, 10.0] on rank 0, [1.0, 11.0] on rank 1",
        ),
        min_ndim=1,
        received_splits=True,
    ),
    OpSpec(
        op=Op.REDUCESCATTER,
        output=Output.ROWS,
        summary="Reduce tensors of one shape over all ranks, element by element; every rank gets its share of the rows "
        "(first dimension). Rows are divided evenly; the first `rows % size` ranks get one more.",
        takes="of the same shape and dtype on all ranks",
        example=Example(
            "[1.0 + hvd.rank(), 2.0]", "op=hvd.Sum", "[3.0] on rank 0, [4.0] on rank 1"
        ),
        grouped=True,
        reduces=True,
        reductions="Average (the default) or Sum",
        min_ndim=1,
        compression_at=1,
    ),
    OpSpec(
        op=Op.REDUCE,
        output=Output.LIKE_INPUT,
        summary="Reduce tensors of one shape over all ranks, element by element; rank `root_rank` (a global rank) gets "
        "the result, and the output of every other rank has the values of its input.",
        takes="of the same shape and dtype on all ranks",
        example=Example(
            "[1.0 + hvd.rank(), 2.0]",
            "root_rank=0, op=hvd.Sum",
            "[3.0, 4.0] on rank 0, [2.0, 2.0] on rank 1",
        ),
        in_place=True,
        reduces=True,
        reductions="Average (the default), Sum, Min, Max or Product",
    ),
    OpSpec(
        op=Op.GATHER,
        output=Output.ROWS,
        summary="Concatenate the tensors of all ranks along the first dimension, in rank order, on rank `root_rank` (a "
        "global rank); the output of every other rank has no rows. The size of that dimension may differ between "
        "ranks; a scalar counts as one row.",
        takes="of the same dtype on all ranks, with rows of the same shape",
        example=Example("[1.0 + hvd.rank()]", "root_rank=0", "[1.0, 2.0] on rank 0, [] on rank 1"),
    ),
    OpSpec(
        op=Op.SCATTER,
        output=Output.ROWS,
        summary="Give rank i of the set the next `splits[i]` rows (first dimension) of the tensor of rank `root_rank` "
        "(a global rank). Without `splits`, rows are divided evenly; the first `rows % size` ranks get one more. The "
        "other ranks pass any tensor of the same dtype with rows of the same shape, or no rows: its values and the "
        "`splits` of these ranks are not used.",
        takes="of the same dtype on all ranks, with rows of the same shape",
        example=Example("[1.0, 2.0]", "root_rank=0", "[1.0] on rank 0, [2.0] on rank 1"),
        min_ndim=1,
    ),
    OpSpec(
        op=Op.SEND,
        output=Output.NONE,
        summary="Send a tensor to rank `dest` (a global rank, which may be this one), where a recv with the same `tag` "
        "takes it. Several sends with one tag arrive in the order of the calls.",
        takes="of the shape and dtype that the recv of the other rank has",
        example=Example(
            "[1.0 + hvd.rank(), 2.0]",
            "dest=1 - hvd.rank()",
            "",
            before="received = hvd.recv_async({tensor}([0.0, 0.0]), source=1 - hvd.rank())",
            after="hvd.synchronize(received)  # -> [2.0, 2.0] on rank 0, [1.0, 2.0] on rank 1",
        ),
        collective=False,
    ),
    OpSpec(
        op=Op.RECV,
        output=Output.INPUT,
        summary="Receive a tensor of this shape and dtype from rank `source` (a global rank, which may be this one), "
        "sent with the same `tag`.",
        takes="of the shape and dtype that the other rank sends",
        example=Example(
            "[0.0, 0.0]",
            "source=1 - hvd.rank()",
            "[2.0, 2.0] on rank 0, [1.0, 2.0] on rank 1",
            before="sent = hvd.send_async({tensor}([1.0 + hvd.rank(), 2.0]), dest=1 - hvd.rank())",
            after="hvd.synchronize(sent)",
        ),
        collective=False,
    ),
)
BY_NAME: Final = {spec.name: spec for spec in OPERATIONS}
