"""The collectives of MPI as algorithms of horoplug: they give the same results as its own algorithms."""

import json
import random
import re

import pytest

from tests.harness.mpi_jobs import finish, mpirun, no_files_of_mpi, on_hosts, place

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi", "place"]  # fixtures

# Two ranks on each of two hosts.
PROGRAM = """
import random
import sys
import ml_dtypes
import numpy as np
import horoplug as hvd
from horoplug.common.context import context
from horoplug.mpi.transport import MpiTransport
from horoplug.base.link_speed import LinkSpeed
from horoplug.mpi.measure import Costs

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
    return numbers.integers(0, 2 if dtype == bool else 3, shape).astype(dtype)

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
        if dtype == bool:
            op = hvd.Sum
        factors = {"prescale_factor": 0.5, "postscale_factor": 4.0} if dtype in FLOATS[1:3] else {}
        common = {"process_set": process_set}
        kind = ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "grouped", "barrier"][step % 7]
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
        own[hvd.rank()] = 5  # all rows stay on this rank, because sending rows to a joined rank is an error
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
            hvd.reducescatter_async(np.full(4 * size, float(step + rank)), op=hvd.Sum, name="plan.r"),
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

COLLECTIVES = "iallreduce iallgatherv ibcast ialltoallv ireduce_scatter ibarrier".split()
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
for mine, other in zip(got, wanted):
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
assert got == wanted[:len(got)]
for length in (1, 200_000):  # the random operations may all be large
    hvd.allgather(np.ones(length))
    hvd.alltoall(np.ones(length * hvd.size()))
hvd.shutdown()
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is done\\n")
"""


def test_mpi_collectives_match_own_algorithms(place, tmp_path):
    seed = random.randrange(10**9)
    print("seed", seed)
    timelines = [tmp_path / "forced.json", tmp_path / "chosen.json"]
    status, output = finish(
        mpirun(
            place,
            on_hosts(PROGRAM),
            str(seed),
            *map(str, timelines),
            np=4,
            HOROVOD_CPU_OPERATIONS="mpi",
        ),
        100,
    )
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output
    # MPI's collectives were used: always, and then depending on the size.
    forced, chosen = map(spans, timelines)
    for kind in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "BARRIER"):
        if (place.name, kind) == ("impi", "ALLGATHER"):  # Intel MPI's allgather may hang
            assert not forced.keys() & {f"MPI_{kind}"}
            continue
        assert f"MPI_{kind}" in forced, (kind, forced)
        if kind in ("ALLGATHER", "ALLTOALL"):
            # Small operations precede the large ones. Horoplug's own algorithm depends on the operation and its size.
            assert max(forced[f"MPI_{kind}"]) > 10_000, (kind, forced)
            own = max(chosen.get(f"STREAM_{kind}", set()) | chosen.get(f"MIXED_{kind}", set()))
            assert max(chosen[f"MPI_{kind}"]) < own, (kind, chosen)


def spans(timeline):
    """The sizes in bytes of the spans in a timeline, by name."""
    found = {}
    for event in json.loads(timeline.read_text()):
        if "bytes" in event.get("args", {}):
            found.setdefault(event["name"], set()).add(event["args"]["bytes"])
    return found
