import os
import random
import sys

import ml_dtypes
import numpy as np
from mpi4py import MPI

import horoplug as hvd
from horoplug.base.link_speed import LinkSpeed
from horoplug.common.context import context
from horoplug.mpi.measure import Costs
from horoplug.mpi.transport import MpiTransport

seed = int(sys.argv[1])
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("u", "") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64", ml_dtypes.bfloat16)]
OPERATIONS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]
# MPI often uses different algorithms for small and for large parts.
SIZES = [0, 0, 1, 3, 100, 5_000, 60_000]


def values(rank, step, count, dtype, columns=1):
    "Small integers, whose sums are exact in any order."
    numbers = np.random.default_rng([seed, rank, step])
    shape = (count, columns) if columns > 1 else (count,)
    return numbers.integers(0, 2 if dtype == np.bool_ else 3, shape).astype(dtype)


def program(steps, process_set=hvd.global_process_set):
    "The results of this rank in a number of random operations."
    choose = random.Random(seed)  # the same choices on all ranks
    rank, size = process_set.rank(), process_set.size()
    results = []
    for step in range(steps):
        dtype = choose.choice([*INTEGERS, *FLOATS, np.dtype(bool)])
        columns = choose.choice([1, 1, 3])
        counts = [choose.choice(SIZES) for _ in range(size)]
        splits = [[choose.choice(SIZES) for _ in range(size)] for _ in range(size)]
        root, op = choose.randrange(size), choose.choice(OPERATIONS)
        if dtype == np.bool_:
            op = hvd.Sum
        factors = {"prescale_factor": 0.5, "postscale_factor": 4.0} if dtype in FLOATS[1:3] else {}
        common = {"process_set": process_set}
        kind = [
            "allreduce",
            "allgather",
            "broadcast",
            "alltoall",
            "reducescatter",
            "grouped",
            "barrier",
        ][step % 7]
        x = values(rank, step, SIZES[step // 7 % len(SIZES)], dtype, columns)
        if kind == "allreduce":
            result = [hvd.allreduce(x, op=op, **factors, **common)]
        elif kind == "allgather":
            result = [hvd.allgather(values(rank, step, counts[rank], dtype, columns), **common)]
        elif kind == "broadcast":
            result = [hvd.broadcast(x, process_set.ranks[root], **common)]
        elif kind == "alltoall":
            x = values(rank, step, sum(splits[rank]), dtype, columns)
            result = list(hvd.alltoall(x, splits=splits[rank], **common))
        elif kind == "reducescatter":
            op = op if op in OPERATIONS[:2] else hvd.Sum
            result = [hvd.reducescatter(x, op=op, **factors, **common)]
        elif kind == "grouped":
            tensors = [values(rank, step + i, count, dtype) for i, count in enumerate(counts)]
            result = hvd.grouped_allreduce(tensors, op=op, **common)
        else:
            hvd.barrier(**common)
            result = []
        results += [(step, kind, str(dtype), np.array(each).tobytes()) for each in result]
    return results


def with_subsets():
    "Operations of three process sets are in flight at the same time."
    sets = [hvd.add_process_set([0, 1, 2]), hvd.add_process_set([1, 3])]
    results = []
    for each in sets:
        if each.included():
            results += program(14, each)
    included = [each for each in [hvd.global_process_set, *sets] if each.included()]
    handles = []
    for i in range(5):
        for each in included:
            x = values(hvd.rank(), i, 100 * i, "float32")
            handles.append(hvd.allgather_async(x, process_set=each, name=f"{i}.{each.size()}"))
    results += [hvd.synchronize(handle).tobytes() for handle in handles]
    for each in sets:
        hvd.remove_process_set(each)
    return results


def until_join():
    "Rank r joins after r + 1 rounds of operations."
    results = []
    for i in range(hvd.rank() + 1):
        own = [0] * hvd.size()
        own[hvd.rank()] = (
            5  # all rows stay on this rank, because sending rows to a joined rank is an error
        )
        results += [
            hvd.allreduce(np.full(1000, 2.0), op=hvd.Sum, name=f"a{i}"),
            hvd.allgather(values(hvd.rank(), i, 100 + hvd.rank(), "int32"), name=f"g{i}"),
            hvd.alltoall(values(hvd.rank(), i, 5, "uint8"), splits=own, name=f"t{i}")[0],
            hvd.broadcast(values(hvd.rank(), i, 70, "float64"), hvd.size() - 1, name=f"b{i}"),
        ]
    hvd.join()
    return [result.tobytes() for result in results]


def in_a_plan(steps=12):
    "The same operations in every step, which become a plan."
    rank, size = hvd.rank(), hvd.size()
    for step in range(steps):
        handles = [
            hvd.allreduce_async(np.full(5000, float(step + rank)), op=hvd.Sum, name="plan.a"),
            hvd.broadcast_async(np.full(3000, float(step + rank)), 1, name="plan.b"),
            hvd.allgather_async(np.full(rank + 1, float(step + rank)), name="plan.g"),
            hvd.reducescatter_async(
                np.full(4 * size, float(step + rank)), op=hvd.Sum, name="plan.r"
            ),
        ]
        total, copied, gathered, scattered = map(hvd.synchronize, handles)
        wanted = float(sum(step + r for r in range(size)))
        assert set(total) == set(scattered) == {wanted} and set(copied) == {step + 1.0}
        assert gathered.tolist() == [float(step + r) for r in range(size) for _ in range(r + 1)]
    assert context.engine().stats()["planned_batches"] > 0


def in_two_sets_of_all():
    "Batches of one set run in order, and concurrently with those of the other set."
    engine = context.engine()
    handle = engine.add_process_set(list(range(hvd.size())))
    number = hvd.common.status.await_value(engine, handle)
    other = hvd.ProcessSet(range(hvd.size()))
    other.process_set_id = number
    context.process_sets[number] = other
    sets = [hvd.global_process_set, other]
    handles = {}
    for step in range(300):
        each = sets[step % 2]
        x = np.full(1 + step * 7919 % 3000, step, ["int32", "int64", "float32"][step % 3])
        handles[step] = hvd.allreduce_async(x, op=hvd.Sum, name=f"{step}", process_set=each)
        if step * 7919 % (20 + hvd.rank()) == 0:
            hvd.poll(handles[step])
    for step, handle in handles.items():
        assert set(hvd.synchronize(handle)) == {hvd.size() * step}


measured = []
measure = MpiTransport.measure
MpiTransport.measure = lambda self, *args: measured.append(1) or measure(self, *args)


def run_all():
    results = [*program(84), *with_subsets(), *until_join()]
    in_a_plan()
    return results


COLLECTIVES = ["iallreduce", "iallgatherv", "ibcast", "ialltoallv", "ireduce_scatter", "ibarrier"]
description = MpiTransport.description
MpiTransport.description = lambda self: description(self) | dict.fromkeys(COLLECTIVES, 0)
hvd.init()
wanted = run_all()
hvd.shutdown()
MpiTransport.description = description

os.environ["HOROPLUG_ALGORITHM"] = "mpi"
os.environ["HOROVOD_TIMELINE"] = sys.argv[2]
hvd.init()
got = run_all()
assert len(got) == len(wanted)
for mine, other in zip(got, wanted, strict=True):
    assert mine == other, (mine[:3], other[:3])
in_two_sets_of_all()
costs = context.connections().mpi.costs
assert len(measured) == 1 and len(costs.collectives) == 6, (measured, costs)
hvd.shutdown()

del os.environ["HOROVOD_TIMELINE"]
# The measurements are reused, unless a rank no longer has them.
for unknown, times in [(False, 1), (True, 2), (False, 2)]:
    if unknown and MPI.COMM_WORLD.rank == 2:
        context._rendezvous._mpi_costs.clear()
    hvd.init()
    assert len(measured) == times, measured
    assert (context.connections().mpi.costs == costs) or times == 2
    assert hvd.allgather(np.ones(hvd.rank())).sum() == 6
    hvd.shutdown()

# All ranks choose the same algorithms, also for operations whose parts differ in size.
del os.environ["HOROPLUG_ALGORITHM"]
os.environ["HOROVOD_TIMELINE"] = sys.argv[3]
MpiTransport.known_costs = lambda self, hosts: Costs(LinkSpeed(5e-5, 1e9), ((1e-6, 1e-8),) * 6)
hvd.init()
got = program(84)
assert got == wanted[: len(got)]
for length in (1, 200_000):  # the random operations may all be large
    hvd.allgather(np.ones(length))
    hvd.alltoall(np.ones(length * hvd.size()))
hvd.shutdown()
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is done\n")
