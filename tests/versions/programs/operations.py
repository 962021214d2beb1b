"""Every operation of a framework, compared with NumPy's result: operations.py FRAMEWORK, on two ranks or more."""

import functools
import operator
import sys

import numpy as np
from frameworks import COMPLEX, INTEGERS, load
from report import Report

framework = load(sys.argv[1])
hvd, tensor, array = framework.hvd, framework.tensor, framework.array
first = hvd.ProcessSet([0])
hvd.init(process_sets=[first])
RANK, SIZE = hvd.rank(), hvd.size()
MEMBERS = [0, SIZE - 1] if SIZE > 2 else [1]
some = hvd.add_process_set(MEMBERS)
RANKS = range(SIZE)
check = Report(RANK)
FLOAT = "float32"


def values(rank: int, rows: int = 6, dtype: str = FLOAT) -> np.ndarray:
    """A rank's numbers: 1 to 3, so that all results but an average of three are exact in every dtype."""
    found = np.random.default_rng(rank).integers(1, 4, size=(rows, 3))
    if dtype == "bool":
        return found > 1
    return (
        found * (1 - 1j)
        if dtype in COMPLEX
        else found.astype(dtype if dtype in INTEGERS else float)
    )


def mine(rows: int = 6, dtype: str = FLOAT):
    return tensor(values(RANK, rows, dtype), dtype)


def all_values(rows: int = 6, dtype: str = FLOAT, ranks=RANKS) -> list[np.ndarray]:
    return [values(rank, rows, dtype) for rank in ranks]


def same(found, expected, tolerance: float = 0.0) -> None:
    found = array(found)
    assert found.shape == np.shape(expected), (found.shape, np.shape(expected))
    np.testing.assert_allclose(found.astype(complex), np.asarray(expected, complex), tolerance)


def total(parts: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(operator.add, parts)


def reductions(dtype: str):
    """The reductions of a dtype, with NumPy's for a list of arrays and the relative tolerance."""
    found = {"Max": (np.maximum, 0.0), "Min": (np.minimum, 0.0)}
    if dtype == "bool":
        return found
    if dtype in COMPLEX:
        found = {}
    else:
        found["Product"] = operator.mul, 0.0
    found["Sum"] = operator.add, 0.0
    if dtype not in INTEGERS and "int" not in dtype:
        found["Average"] = (
            (lambda a, b: a + b),
            {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6),
        )
    return found


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = (a * b).sum()
    return a * (1 - product / (2 * (a * a).sum())) + b * (1 - product / (2 * (b * b).sum()))


for dtype in framework.dtypes:
    for name, (reduction, tolerance) in reductions(dtype).items():
        with check(f"allreduce {dtype} {name}"):
            expected = functools.reduce(reduction, all_values(dtype=dtype))
            expected = expected / SIZE if name == "Average" else expected
            same(hvd.allreduce(mine(dtype=dtype), op=getattr(hvd, name)), expected, tolerance)
    with check(f"allgather {dtype}, different first dimensions"):
        expected = np.concatenate([values(rank, rank + 1, dtype) for rank in RANKS])
        same(hvd.allgather(mine(RANK + 1, dtype)), expected)
    with check(f"broadcast {dtype}"):
        same(hvd.broadcast(mine(dtype=dtype), root_rank=SIZE - 1), values(SIZE - 1, dtype=dtype))
    with check(f"alltoall {dtype}, different splits"):
        rows = SIZE * (SIZE + 1) // 2  # rank i gets i + 1 rows of each
        start = RANK * (RANK + 1) // 2
        expected = [each[start : start + RANK + 1] for each in all_values(rows, dtype)]
        splits = [rank + 1 for rank in RANKS]
        splits = (
            np.array(splits, np.int32)
            if sys.argv[1] == "jax"
            else tensor(np.array(splits), "int32")
        )
        found, received = hvd.alltoall(mine(rows, dtype), splits=splits)
        same(found, np.concatenate(expected))
        assert (
            np.asarray(received.asnumpy() if hasattr(received, "asnumpy") else received).tolist()
            == [RANK + 1] * SIZE
        )
    if dtype != "bool":
        with check(f"reducescatter {dtype}"):
            parts = np.array_split(total(all_values(2 * SIZE + 1, dtype)), SIZE)
            same(hvd.reducescatter(mine(2 * SIZE + 1, dtype), op=hvd.Sum), parts[RANK])

with check("allreduce with factors"):
    found = hvd.allreduce(mine(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(found, 2 * total(all_values()))
with check("allreduce of a large tensor"):
    same(
        hvd.allreduce(tensor(np.full(3_000_000, RANK + 1.0), FLOAT), op=hvd.Sum),
        np.full(3_000_000, sum(RANKS) + SIZE),
    )
with check("allreduce without elements"):
    same(hvd.allreduce(tensor(np.zeros((0, 3)), FLOAT), op=hvd.Sum), np.zeros((0, 3)))
if SIZE == 2:
    with check("allreduce Adasum"):
        same(hvd.allreduce(mine(), op=hvd.Adasum), adasum(*all_values()), 1e-5)
if framework.compression:
    for kind in ("fp16", "bf16"):
        with check(f"allreduce with compression {kind}"):
            found = hvd.allreduce(mine(), op=hvd.Sum, compression=getattr(hvd.Compression, kind))
            same(found, total(all_values()))
with check("alltoall, equal splits"):
    parts = [each[2 * RANK : 2 * RANK + 2] for each in all_values(2 * SIZE)]
    same(hvd.alltoall(mine(2 * SIZE)), np.concatenate(parts))

with check("grouped_allreduce"):
    found = hvd.grouped_allreduce([mine(rows) for rows in (1, 4, 7)], op=hvd.Sum)
    for part, rows in zip(found, (1, 4, 7), strict=True):
        same(part, total(all_values(rows)))
with check("grouped_allgather"):
    found = hvd.grouped_allgather([mine(rows) for rows in (1, 4)])
    for part, rows in zip(found, (1, 4), strict=True):
        same(part, np.concatenate(all_values(rows)))
with check("grouped_reducescatter"):
    found = hvd.grouped_reducescatter([mine(rows * SIZE) for rows in (1, 4)], op=hvd.Sum)
    for part, rows in zip(found, (1, 4), strict=True):
        same(part, np.split(total(all_values(rows * SIZE)), SIZE)[RANK])

if framework.in_place:
    with check("allreduce_"):
        changed = mine()
        hvd.allreduce_(changed, op=hvd.Sum)
        same(changed, total(all_values()))
    with check("broadcast_"):
        changed = mine()
        hvd.broadcast_(changed, root_rank=SIZE - 1)
        same(changed, values(SIZE - 1))
    with check("grouped_allreduce_"):
        changed = [mine(1), mine(4)]
        hvd.grouped_allreduce_(changed, op=hvd.Sum)
        for part, rows in zip(changed, (1, 4), strict=True):
            same(part, total(all_values(rows)))

if framework.asynchronous:
    with check("asynchronous operations, in another order on each rank"):
        begin = {
            "sum": lambda: hvd.allreduce_async(mine(), op=hvd.Sum, name="sum"),
            "rows": lambda: hvd.allgather_async(mine(RANK + 1), name="rows"),
            "root": lambda: hvd.broadcast_async(mine(), root_rank=0, name="root"),
            "part": lambda: hvd.reducescatter_async(mine(SIZE), op=hvd.Sum, name="part"),
        }
        handles = {name: begin[name]() for name in sorted(begin, reverse=bool(RANK % 2))}
        found = {name: hvd.synchronize(handle) for name, handle in handles.items()}
        same(found["sum"], total(all_values()))
        same(found["rows"], np.concatenate([values(rank, rank + 1) for rank in RANKS]))
        same(found["root"], values(0))
        same(found["part"], total(all_values(SIZE))[RANK : RANK + 1])
    with check("allreduce_async_ and poll"):
        changed = mine()
        handle = hvd.allreduce_async_(changed, op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        hvd.synchronize(handle)
        same(changed, total(all_values()))

if framework.rooted:
    with check("reduce"):
        found = hvd.reduce(mine(), root_rank=SIZE - 1, op=hvd.Sum)
        same(found, total(all_values()) if RANK == SIZE - 1 else values(RANK))
    with check("gather"):
        found = hvd.gather(mine(RANK + 1), root_rank=0)
        if RANK == 0:
            same(found, np.concatenate([values(rank, rank + 1) for rank in RANKS]))
    with check("scatter"):
        same(hvd.scatter(mine(SIZE), root_rank=0), values(0, SIZE)[RANK : RANK + 1])
    with check("send and recv"):
        if RANK == 0:
            hvd.send(mine(), dest=SIZE - 1, tag=7)
        elif RANK == SIZE - 1:
            changed = mine()
            hvd.recv(changed, source=0, tag=7)
            same(changed, values(0))

for name, compiler in framework.compilers.items():
    with check(f"operations in {name}"):

        def program(x, name=name):
            rows = hvd.allgather(x, name=f"{name}.rows")
            part = hvd.reducescatter(x, op=hvd.Sum, name=f"{name}.part")
            root = hvd.broadcast(x, root_rank=SIZE - 1, name=f"{name}.root")
            moved = hvd.alltoall(x, name=f"{name}.moved")
            return hvd.allreduce(x, op=hvd.Sum, name=f"{name}.sum"), rows, part, root, moved

        compiled = compiler(program)
        for _ in range(3):
            found = compiled(mine(SIZE))
        parts = all_values(SIZE)
        moved = np.concatenate([each[RANK : RANK + 1] for each in parts])
        whole = total(parts)
        expected = [whole, np.concatenate(parts), whole[RANK : RANK + 1], parts[-1], moved]
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    with check(f"an error in {name}"):
        failure = None
        try:
            array(
                compiler(lambda x, name=name: hvd.allreduce(x, name=f"{name}.bad"))(mine(RANK + 1))
            )
        except Exception as error:
            failure = error
        assert "shape" in str(failure), failure

with check("barrier"):
    hvd.barrier()
with check("broadcast_object"):
    thing = {"rank": RANK, "text": "ä" * 1000}
    assert hvd.broadcast_object(thing, root_rank=SIZE - 1)["rank"] == SIZE - 1
with check("allgather_object"):
    assert hvd.allgather_object(["x"] * RANK) == [["x"] * rank for rank in RANKS]
with check("process sets"):
    if RANK == 0:
        same(hvd.allreduce(mine(), op=hvd.Sum, process_set=first), values(0))
    if RANK in MEMBERS:
        found = hvd.allreduce(mine(), op=hvd.Sum, process_set=some)
        same(found, total(all_values(ranks=MEMBERS)))
        found = hvd.allgather(mine(RANK + 1), process_set=some)
        same(found, np.concatenate([values(rank, rank + 1) for rank in MEMBERS]))
with check("join"):
    for step in range(RANK + 1):
        found = hvd.allreduce(mine(), op=hvd.Sum, name=f"uneven.{step}")
        same(found, total(all_values(ranks=[rank for rank in RANKS if rank >= step])))
    assert int(hvd.join()) in RANKS
with check("shutdown and init"):
    hvd.shutdown()
    hvd.init()
    same(hvd.allreduce(mine(), op=hvd.Sum), total(all_values()))
check.finish()
