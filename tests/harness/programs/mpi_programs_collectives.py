import hashlib
import os
import sys

import ml_dtypes
import numpy as np

import horoplug as hvd
from horoplug.common.context import context

DTYPES = [
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "bool",
]
SIZES = [1, 3, 1000, 40_001]
LARGE = 1_500_007


def values(rank, count, dtype):
    random = np.random.default_rng([rank, count])
    if np.dtype(dtype).kind in "iu":
        return random.integers(0, 5, count).astype(dtype)
    if dtype == "bool":
        return random.random(count) < 0.5
    return random.standard_normal(count).astype(dtype)


def all_have(result):
    digest = hashlib.sha256(np.ascontiguousarray(result).tobytes()).digest()
    return len(set(hvd.allgather_object(digest))) == 1


REDUCE = {
    hvd.Sum: np.sum,
    hvd.Average: np.mean,
    hvd.Min: np.min,
    hvd.Max: np.max,
    hvd.Product: np.prod,
}


def check_allreduce(dtype, count, op):
    size = hvd.size()
    everyones = np.stack([values(r, count, dtype) for r in range(size)])
    result = hvd.allreduce(everyones[hvd.rank()], op=op)
    assert result.dtype == everyones.dtype, (result.dtype, dtype)
    assert all_have(result), (dtype, count, op)
    if dtype == "bool":
        return
    exact = (
        everyones.astype(np.float64)
        if everyones.dtype.kind not in "iu"
        else everyones.astype(object)
    )
    wanted = REDUCE[op](exact, axis=0)
    if everyones.dtype.kind in "iu":
        assert result.tolist() == [int(x) for x in wanted], (dtype, count, op)
    else:
        tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[everyones.dtype.itemsize]
        np.testing.assert_allclose(
            result.astype(np.float64), wanted, rtol=tolerance, atol=tolerance
        )


def check(large):
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*DTYPES, ml_dtypes.bfloat16]:
        for count in SIZES[:2] if dtype in DTYPES[:5] else SIZES[:3]:
            check_allreduce(dtype, count, hvd.Sum)
    for op in REDUCE:
        check_allreduce("float32", 40_001, op)
        check_allreduce("int64", 999, op)
    if large:
        check_allreduce("float32", LARGE, hvd.Sum)
        check_allreduce("float64", LARGE, hvd.Average)
    # NaN with different payloads, and infinity with different signs, give the same bits on every rank.
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1.0], np.float32)
    odd.view(np.uint32)[0] = 0x7FC00001 + rank
    assert all_have(hvd.allreduce(odd * (1 if rank else -1), op=hvd.Sum))
    # The other operations, with parts of different sizes.
    rows = [values(r, 1000 * r + 7, "float32") for r in range(size)]
    assert np.array_equal(hvd.allgather(rows[rank]), np.concatenate(rows))
    for root in range(size):
        result = hvd.broadcast(values(rank, 70_001, "float64"), root)
        assert np.array_equal(result, values(root, 70_001, "float64"))
    splits = [[(a + b) % 3 * 5_000 for b in range(size)] for a in range(size)]
    parts = [
        np.split(values(a, sum(splits[a]), "int32"), np.cumsum(splits[a])[:-1]) for a in range(size)
    ]
    result, received = hvd.alltoall(np.concatenate(parts[rank]), splits=splits[rank])
    assert np.array_equal(result, np.concatenate([parts[a][rank] for a in range(size)]))
    assert received.tolist() == [splits[a][rank] for a in range(size)]
    total = np.sum([values(r, 40_003, "int64") for r in range(size)], axis=0)
    result = hvd.reducescatter(values(rank, 40_003, "int64"), op=hvd.Sum)
    assert np.array_equal(result, np.array_split(total, size)[rank])
    hvd.barrier()


def check_adasum():
    for count in (5, 30_000):
        assert all_have(hvd.allreduce(values(hvd.rank(), count, "float32"), op=hvd.Adasum))


def check_process_sets():
    lists = [[0, 1], [1, 2, 3], [0, 2], [3]]
    sets = [hvd.add_process_set(ranks) for ranks in lists]
    for _ in range(5):
        handles = []
        for each in sets if hvd.rank() % 2 else reversed(sets):
            if not each.included():
                continue
            x = np.full(30_000, 1.0 + hvd.rank(), np.float32)
            handles.append(
                (
                    each,
                    hvd.allreduce_async(x, op=hvd.Sum, name=f"set.{each.ranks}", process_set=each),
                )
            )
        for each, handle in handles:
            assert set(hvd.synchronize(handle)) == {sum(1.0 + r for r in each.ranks)}
    for each in sets:
        hvd.remove_process_set(each)


def check_plans(steps=25):
    "The same operations in every step. An extra operation after some steps uninstalls the plan."
    for step in range(steps):
        tensors = [
            np.full(20_000 * (i + 1), float(step + hvd.rank() + i), np.float32) for i in range(6)
        ]
        handles = [
            hvd.allreduce_async_(x, op=hvd.Sum, name=f"grad.{i}") for i, x in enumerate(tensors)
        ]
        for i, handle in enumerate(handles):
            result = hvd.synchronize(handle)
            wanted = sum(step + r + i for r in range(hvd.size()))
            assert (result == wanted).all(), (step, i)
        if step % 10 == 9:  # an operation that the plan does not contain
            assert hvd.allreduce(np.array([1.0]), op=hvd.Sum, name=f"extra.{step}")[0] == hvd.size()
    assert context.engine().stats()["planned_batches"] > 0


def check_join():
    for i in range(hvd.rank() + 1):
        hvd.allreduce(np.ones(50_000, np.float32), op=hvd.Sum, name=f"until.{i}")
    assert 0 <= hvd.join() < hvd.size()


for algorithm in sys.argv[1].split(","):
    os.environ["HOROPLUG_ALGORITHM"] = algorithm
    hvd.init()
    carrier = context.connections().mpi
    assert carrier is not None and all(latency > 0 for latency, _ in carrier.costs.collectives)
    assert (hvd.size(), hvd.cross_size()) == (4, 2)
    check(large=algorithm in ("", "mpi"))
    check_plans()
    check_join()
    if algorithm == "":
        check_adasum()
        check_process_sets()
    hvd.shutdown()
from mpi4py import MPI

sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is done\n")
