"""What ``horoplug.bench`` measures: a collective on one array of each rank, with a check of its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

Run = Callable[[], Any]

OPS = ("sum", "avg", "min", "max", "prod")


class Collective(NamedTuple):
    """``size`` of the table over the input's size, and busbw over algbw, both by number of ranks."""

    size_factor: Callable[[int], int]
    bus_factor: Callable[[int], float]
    divided: bool
    """The size is a multiple of the number of ranks."""
    reduces: bool


COLLECTIVES = {
    "allreduce": Collective(lambda n: 1, lambda n: 2 * (n - 1) / n, False, True),
    "allgather": Collective(lambda n: n, lambda n: (n - 1) / n, True, False),
    "broadcast": Collective(lambda n: 1, lambda n: 1.0, False, False),
    "alltoall": Collective(lambda n: 1, lambda n: (n - 1) / n, True, False),
    "reducescatter": Collective(lambda n: 1, lambda n: (n - 1) / n, True, True),
    "sendrecv": Collective(lambda n: 1, lambda n: 2.0, False, False),
    "barrier": Collective(lambda n: 1, lambda n: 0.0, False, False),
}


@dataclass(frozen=True)
class Case:
    """A measured case: ``collective`` with an input of ``count`` elements per rank."""

    collective: str
    dtype: np.dtype[Any]
    op: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.collective}.{self.dtype}.{self.op}.{self.count}"


class Prepared(NamedTuple):
    """An input, one operation on it, and its output: None if the operation returns the output."""

    x: np.ndarray
    run: Run
    output: Any = None

    def result(self) -> np.ndarray:
        """Run the operation and return its output."""
        returned = self.run()
        return np.asarray(returned if self.output is None else self.output).ravel()


def find_dtype(name: str) -> np.dtype[Any]:
    """The type of a NumPy name, or ``bfloat16``, for which it needs ml_dtypes. Errors: TypeError, ImportError."""
    if name == "bfloat16":
        import ml_dtypes

        return cast(np.dtype[Any], np.dtype(ml_dtypes.bfloat16))
    return np.dtype(name)


def byte_count(text: str) -> int:
    """``8``, ``64K``, ``256M`` or ``1G``; binary multiples, as in nccl-tests."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    unit = units.get(text[-1:].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def sizes(begin: int, end: int, factor: float) -> Iterator[int]:
    """Bytes: ``begin``, ``begin * factor`` and so on up to ``end``."""
    size = float(begin)
    while round(size) <= end:
        yield round(size)
        size *= factor


def cases(
    collective: str, dtype: np.dtype[Any], op: str, wanted: Iterator[int], ranks: int
) -> Iterator[tuple[int, Case]]:
    """The cases with about as many bytes as are wanted, each with its bytes; none twice in a row. A barrier, which has
    no data, has one case."""
    kind = COLLECTIVES[collective]
    previous = 0
    for size in itertools.islice(wanted, 1) if collective == "barrier" else wanted:
        count = max(1, size // dtype.itemsize)
        if kind.divided:
            # An allgather's size is its output, whose parts are the ranks' inputs.
            count = max(1, count // ranks) * (ranks // kind.size_factor(ranks))
        if count != previous:
            case = Case(collective, dtype, op, count)
            yield count * dtype.itemsize * kind.size_factor(ranks), case
        previous = count


def iterations_of(size: int) -> int:
    """How often to repeat an operation on this number of bytes."""
    return min(1000, max(20, 2**28 // max(1, size)))


def partner_of(rank: int, size: int) -> int:
    """The other rank of a pair. Raises SystemExit for an odd number of ranks."""
    if size % 2:
        raise SystemExit(f"sendrecv needs an even number of ranks, not {size}")
    return rank ^ 1


def round_trip(rank: int, send: Run, receive: Run) -> Run:
    """The rank with the lower number begins."""
    first, second = (receive, send) if rank % 2 else (send, receive)

    def run() -> None:
        first()
        second()

    return run


def prepare(hvd: Any, case: Case) -> Prepared:
    """The operation of horoplug's functions for NumPy arrays, in place if that variant exists."""
    x, name = np.empty(case.count, case.dtype), case.name
    reductions = (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)
    op = dict(zip(OPS, reductions, strict=True))[case.op]
    runs: dict[str, Run] = {
        "allreduce": lambda: hvd.allreduce_(x, op=op, name=name),
        "allgather": lambda: hvd.allgather(x, name=name),
        "broadcast": lambda: hvd.broadcast_(x, root_rank=0, name=name),
        "alltoall": lambda: hvd.alltoall(x, name=name),
        "reducescatter": lambda: hvd.reducescatter(x, op=op, name=name),
    }
    if case.collective == "sendrecv":
        y, other = np.empty_like(x), partner_of(hvd.rank(), hvd.size())
        send, receive = lambda: hvd.send(x, other), lambda: hvd.recv(y, other)
        return Prepared(x, round_trip(hvd.rank(), send, receive), y)
    if case.collective == "barrier":
        return Prepared(x, hvd.barrier, x)
    return Prepared(x, runs[case.collective])


# ---- the check -------------------------------------------------------------------------------------------------------


def pattern(case: Case, rank: int) -> np.ndarray:
    """The pattern that a rank's input repeats: small numbers, so that every dtype represents the result exactly."""
    start = np.arange(4) + rank
    return (1 + start % 2 if case.op == "prod" else start % 4).astype(case.dtype)


def values(case: Case, rank: int) -> np.ndarray:
    return np.resize(pattern(case, rank), case.count)


def expected(case: Case, rank: int, size: int) -> np.ndarray:
    part = slice(rank * (case.count // size), (rank + 1) * (case.count // size))
    if case.collective == "barrier":
        return values(case, rank)
    if case.collective == "broadcast":
        return values(case, 0)
    if case.collective == "sendrecv":
        return values(case, partner_of(rank, size))
    if case.collective == "allgather":
        return np.concatenate([values(case, r) for r in range(size)])
    if case.collective == "alltoall":
        return np.concatenate([values(case, r)[part] for r in range(size)])
    reducers: dict[str, Callable[..., Any]] = {"min": np.min, "max": np.max, "prod": np.prod}
    reduce = reducers.get(case.op, np.sum)
    total = reduce([pattern(case, r).astype(np.float64) for r in range(size)], axis=0)
    if case.op == "avg":
        total /= size
    result = np.resize(total.astype(case.dtype), case.count)
    return result[part] if case.collective == "reducescatter" else result


def wrong_elements(hvd: Any, case: Case, prepared: Prepared) -> int:
    """The number of elements with a wrong result, summed over all ranks. Leaves zeros in the input."""
    prepared.x[:] = values(case, hvd.rank())
    got, right = prepared.result(), expected(case, hvd.rank(), hvd.size())
    wrong = right.size if got.size != right.size else int(np.count_nonzero(got != right))
    prepared.x[:] = 0
    return int(hvd.allreduce(np.array([wrong], np.int64), op=hvd.Sum, name="check")[0])
