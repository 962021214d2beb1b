"""The random operations of a soak test: what a rank passes to each, and what it must get."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import horoplug as hvd
from tests.harness.adasum_reference import adasum
from tests.soak.frameworks import Request

KINDS = (
    "sum",
    "min",
    "average",
    "group",
    "gather all",
    "broadcast",
    "exchange",
    "scatter reduced",
    "reduce",
    "gather",
    "scatter",
    "pair",
    "adasum",
    "object",
    "objects",
)
OBJECTS = ("object", "objects")  # these block, so that all ranks perform them in one order
COUNTS = (1, 3, 100, 5000)
LARGE = 40_000


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    kind: str
    dtype: str
    count: int  # columns
    root: int  # rank in the set
    dest: int  # rank in the set that receives of a pair
    tag: int  # of a pair


def draw_pattern(draw: random.Random, stream: int, size: int, number: int) -> list[Operation]:
    """The operations of a step of a stream, whose process set has this size."""
    kinds = [kind for kind in KINDS if kind != "adasum" or size & (size - 1) == 0]

    def operation(n: int) -> Operation:
        kind = draw.choice(kinds)
        return Operation(
            f"s{stream}.p{number if draw.random() < 0.5 else 'x'}.{n}",
            kind,
            draw.choice(["f4", "f8"] if kind == "adasum" else ["f4", "f8", "i4", "i8", "u1"]),
            LARGE if draw.random() < 0.02 else draw.choice(COUNTS),
            draw.randrange(size),
            draw.randrange(size),
            10_000 * stream + 100 * number + n,
        )

    return [operation(n) for n in range(draw.choice([1, 2, 5, 12]))]


def data(rank: int, rows: int, operation: Operation, step: int) -> np.ndarray:
    """What a rank of the set passes. At most 13 + 2 * rank, so that sums of eight ranks fit into one byte."""
    values = np.arange(rows * operation.count) % 7 + 2 * rank + step % 7
    return values.reshape(rows, operation.count).astype(operation.dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    request: Request
    expected: np.ndarray
    part: Callable[[Any], Any]  # of the result, that is compared

    def check(self, result: Any) -> None:
        same(self.part(result), self.expected)


@dataclasses.dataclass(frozen=True)
class Caller:
    """A rank of a process set. ``members``: global ranks of the set."""

    process_set: hvd.ProcessSet
    members: tuple[int, ...]
    rank: int
    even: bool  # all ranks pass equally many rows

    def case(self, operation: Operation, step: int) -> Case:
        """The call of an operation that is neither a pair nor one of objects."""
        size, rank, root = len(self.members), self.rank, operation.root
        every = [data(r, size, operation, step) for r in range(size)]
        mine = every[rank].copy()
        total = np.sum(every, axis=0, dtype="f8")
        from_root = {"root_rank": self.members[root]}

        def case(
            function: str,
            expected: Any,
            given: Any = mine,
            part: Callable[[Any], Any] = lambda x: x,
            in_place: bool = False,
            **options: Any,
        ) -> Case:
            options |= {"name": operation.name, "process_set": self.process_set}
            arrays = given if isinstance(given, list) else [given]
            request = Request(function, arrays, options, in_place)
            return Case(request, np.asarray(expected).astype(operation.dtype), part)

        match operation.kind:
            case "sum":
                return case("allreduce", total, op=hvd.Sum, in_place=True)
            case "min":
                return case("allreduce", every[0], op=hvd.Min)
            case "average":
                average = total / size if "f" in operation.dtype else total // size
                return case("allreduce", average, op=hvd.Average)
            case "adasum":
                return case("allreduce", adasum(every), op=hvd.Adasum)
            case "group":
                tensors = [mine, mine[:1], mine[0, :1]]
                expected = every[-1][:1]
                return case("grouped_allreduce", expected, tensors, lambda x: x[1], op=hvd.Max)
            case "gather all":  # some ranks have no rows
                rows = [
                    each[: 1 if self.even else (r + step) % size] for r, each in enumerate(every)
                ]
                return case("allgather", np.concatenate(rows), rows[rank].copy())
            case "broadcast":
                return case("broadcast", every[root], **from_root)
            case "exchange":
                return case("alltoall", [each[rank] for each in every])
            case "scatter reduced":
                return case("reducescatter", total[rank : rank + 1], op=hvd.Sum)
            case "reduce":
                expected = total if rank == root else every[rank]
                return case("reduce", expected, op=hvd.Sum, **from_root)
            case "gather":
                expected = np.concatenate([each[:1] for each in every])
                mine_only = expected if rank == root else expected[:0]
                return case("gather", mine_only, mine[:1], **from_root)
            case "scatter":
                return case("scatter", every[root][rank : rank + 1], **from_root)
        raise ValueError(operation.kind)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    else:
        np.testing.assert_array_equal(found, expected)
