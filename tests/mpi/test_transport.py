"""Data between hosts over MPI: ranks of one machine that are on different hosts by their names."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.harness.mpi_jobs import find, finish, mpirun, no_files_of_mpi, on_hosts, place
from tests.harness.support import NO_LIMITS, until

pytest.importorskip("mpi4py")

__all__ = ["no_files_of_mpi", "place"]  # fixtures


# What is between these tests and MPI is the same for all; Intel's starts slowly.
@pytest.fixture(params=["openmpi", "mpich"])
def one_of_two(request):
    return find(request.param)


# ---- results ---------------------------------------------------------------------------------------------------------

# Two ranks on each of two hosts. Inputs depend on the rank, and sums of them on the order of adding.
COLLECTIVES = """
import hashlib
import os
import sys
import ml_dtypes
import numpy as np
import horoplug as hvd
from horoplug.common.context import context

DTYPES = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 bool".split()
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

REDUCE = {hvd.Sum: np.sum, hvd.Average: np.mean, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}

def check_allreduce(dtype, count, op):
    size = hvd.size()
    everyones = np.stack([values(r, count, dtype) for r in range(size)])
    result = hvd.allreduce(everyones[hvd.rank()], op=op)
    assert result.dtype == everyones.dtype, (result.dtype, dtype)
    assert all_have(result), (dtype, count, op)
    if dtype == "bool":
        return
    exact = everyones.astype(np.float64) if everyones.dtype.kind not in "iu" else everyones.astype(object)
    wanted = REDUCE[op](exact, axis=0)
    if everyones.dtype.kind in "iu":
        assert result.tolist() == [int(x) for x in wanted], (dtype, count, op)
    else:
        tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[everyones.dtype.itemsize]
        np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)

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
    # Numbers that are none come out alike, whoever had which.
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1.0], np.float32)
    odd.view(np.uint32)[0] = 0x7FC00001 + rank
    assert all_have(hvd.allreduce(odd * (1 if rank else -1), op=hvd.Sum))
    # The rest, in odd parts.
    rows = [values(r, 1000 * r + 7, "float32") for r in range(size)]
    assert np.array_equal(hvd.allgather(rows[rank]), np.concatenate(rows))
    for root in range(size):
        result = hvd.broadcast(values(rank, 70_001, "float64"), root)
        assert np.array_equal(result, values(root, 70_001, "float64"))
    splits = [[(a + b) % 3 * 5_000 for b in range(size)] for a in range(size)]
    parts = [np.split(values(a, sum(splits[a]), "int32"), np.cumsum(splits[a])[:-1]) for a in range(size)]
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
    for repeat in range(5):
        handles = []
        for each in sets if hvd.rank() % 2 else reversed(sets):
            if not each.included():
                continue
            x = np.full(30_000, 1.0 + hvd.rank(), np.float32)
            handles.append((each, hvd.allreduce_async(x, op=hvd.Sum, name=f"set.{each.ranks}", process_set=each)))
        for each, handle in handles:
            assert set(hvd.synchronize(handle)) == {sum(1.0 + r for r in each.ranks)}
    for each in sets:
        hvd.remove_process_set(each)

def check_plans(steps=25):
    "The same operations in every step, of which each rank is the last one to be ready at times."
    for step in range(steps):
        tensors = [np.full(20_000 * (i + 1), float(step + hvd.rank() + i), np.float32) for i in range(6)]
        handles = [hvd.allreduce_async_(x, op=hvd.Sum, name=f"grad.{i}") for i, x in enumerate(tensors)]
        for i, handle in enumerate(handles):
            result = hvd.synchronize(handle)
            wanted = sum(step + r + i for r in range(hvd.size()))
            assert (result == wanted).all(), (step, i)
        if step % 10 == 9:  # something that the plan does not have
            assert hvd.allreduce(np.array([1.0]), op=hvd.Sum, name=f"extra.{step}")[0] == hvd.size()
    assert context.engine().stats()["planned_batches"] > 0

def check_join():
    for i in range(hvd.rank() + 1):
        hvd.allreduce(np.ones(50_000, np.float32), op=hvd.Sum, name=f"until.{i}")
    assert 0 <= hvd.join() < hvd.size()

for algorithm in sys.argv[1].split(","):
    os.environ["HOROPLUG_ALGORITHM"] = algorithm
    hvd.init()
    carrier = context.mesh().mpi
    assert carrier is not None and all(latency > 0 for latency, _ in carrier.costs.collectives)
    assert (hvd.size(), hvd.cross_size()) == (4, 2)
    check(large=algorithm in ("", "mpi"))
    check_plans()
    check_join()
    if algorithm == "":
        check_adasum()
        check_process_sets()
    hvd.shutdown()
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is done\\n")
"""


@pytest.mark.parametrize(
    "algorithms", [",mpi", "ring,pairwise,doubling,hierarchical"], ids=["default", "forced"]
)
def test_collectives(place, algorithms):
    if algorithms.startswith("ring") and place.name == "impi":
        pytest.skip("what is between the algorithm and MPI is the same for all")
    job = mpirun(place, on_hosts(COLLECTIVES), algorithms, np=4, HOROVOD_CPU_OPERATIONS="mpi")
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output


STANDARD = """
from horoplug.mpi.libraries import loaded_libraries
(library,) = loaded_libraries()
assert "libmpi_abi" in library, library
"""


@pytest.mark.parametrize("name", ["mpich", "impi"])
def test_the_standard_abi(name):
    """With an mpi4py that knows no other one."""
    found, abi = find(name), ROOT / "build/mpi/abi"
    if not (abi / ".installed").exists():
        pytest.skip("mpi4py for the standard ABI is not installed: make mpi")
    variables = found.environment() | {
        "MPI4PY_LIBMPI": str(found.prefix / "lib/libmpi_abi.so.1"),
        "MPI4PY_MPIABI": "",
        "PYTHONPATH": f"{abi}:{os.environ.get('PYTHONPATH', '')}",
        "HOROVOD_CPU_OPERATIONS": "mpi",
    }
    job = mpirun(found, on_hosts(STANDARD + COLLECTIVES), ",mpi", np=4, **variables)
    status, output = finish(job, timeout=100)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) is done", output)) == ["0", "1", "2", "3"], output


# ---- which way is taken ----------------------------------------------------------------------------------------------

WAY = """
import sys
import numpy as np
import horoplug as hvd
from horoplug.common.context import context
try:
    hvd.init()
except Exception as error:
    sys.stdout.write(f"refused: {type(error).__name__}: {error}\\n")
    sys.exit(0)
assert hvd.allreduce(np.ones(1000), op=hvd.Sum).tolist() == [hvd.size()] * 1000
way = "MPI" if context.mesh().mpi else "TCP"
sys.stdout.write(f"over {way}, {hvd.mpi_enabled()} {hvd.mpi_threads_supported()} {hvd.gloo_enabled()}\\n")
"""


def ways(output: str) -> list[str]:
    return re.findall(r"over (MPI|TCP),", output)


@pytest.fixture
def mpich():
    return find("mpich")


@pytest.mark.parametrize(
    ("variables", "way"),
    [
        ({}, None),
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, "TCP"),
        ({"HOROVOD_CONTROLLER": "gloo"}, "TCP"),
        ({"HOROVOD_CONTROLLER": "gloo", "HOROPLUG_CPU_OPERATIONS": "mpi"}, "MPI"),
    ],
)
def test_the_way_is_chosen(mpich, variables, way):
    status, output = finish(mpirun(mpich, on_hosts(WAY), HOROVOD_LOG_LEVEL="info", **variables))
    assert status == 0, output
    assert ways(output) in (["MPI"] * 2, ["TCP"] * 2), output
    if way is None:  # whatever is faster, and rank 0 says which and why
        assert f"data between hosts goes over {ways(output)[0]}: MPICH" in output
    else:
        assert ways(output)[0] == way, output


def test_ranks_that_want_different_ways(mpich):
    script = on_hosts(
        'os.environ["HOROVOD_CPU_OPERATIONS"] = ["mpi", "gloo"][MPI.COMM_WORLD.rank]\n' + WAY
    )
    _, output = finish(mpirun(mpich, script))
    assert len(re.findall(r"refused: .*set HOROVOD_CPU_OPERATIONS alike", output)) == 2, output


@pytest.mark.parametrize("name", ["CPU_OPERATIONS", "CONTROLLER"])
def test_without_mpirun(monkeypatch, name):
    """A job that something else has started cannot use MPI; one of a single process need not."""
    import horoplug as hvd

    monkeypatch.setenv(f"HOROVOD_{name}", "mpi")
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.raises(ValueError, match=f"HOROVOD_{name}=mpi.*mpirun"):
        hvd.init()


# ---- communicators ---------------------------------------------------------------------------------------------------

SETS = """
import numpy as np
import horoplug as hvd
world = MPI.COMM_WORLD

def total(process_set):
    return hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum, process_set=process_set)[0]

# Each rank has its own half.
half = hvd.ProcessSet(world.Split(world.rank % 2, world.rank))
assert half.ranks is None and half.mpi_comm is not None
hvd.init(comm=world, process_sets=[half])
assert half.ranks == [r for r in range(hvd.size()) if r % 2 == hvd.rank() % 2]
assert half.size() == 2 and half.included() and half.rank() == hvd.rank() // 2
assert total(half) == sum(half.ranks)
assert sorted(hvd.common.process_sets._get_process_set_ids_and_ranks().items()) == [
    (0, [0, 1, 2, 3]), (1, [0, 2]), (2, [1, 3])
]
# Not all ranks are in one.
some = hvd.add_process_set(world.Split(0 if world.rank > 1 else MPI.UNDEFINED, 0))
assert some.ranks == ([2, 3] if hvd.rank() > 1 else [])
if some.included():
    assert total(some) == 5
hvd.barrier()  # who leaves ends the job for all
hvd.shutdown()
# In a job of some processes in another order, its ranks count.
part = world.Split(world.rank // 2, -world.rank)
hvd.init(comm=part)
alone = hvd.add_process_set(MPI.COMM_SELF)
assert alone.ranks == [hvd.rank()] and total(alone) == hvd.rank()
try:
    hvd.add_process_set(world)
except ValueError as error:
    assert "not all are in this job" in str(error), error
hvd.barrier()
hvd.shutdown()
# All of them in another order.
backwards = world.Split(0, -world.rank)
hvd.init(comm=backwards)
assert (hvd.rank(), hvd.size()) == (backwards.rank, 4) == (3 - world.rank, 4)
hvd.barrier()
hvd.shutdown()
world.Barrier()  # rank 0 serves the rendezvous of all jobs
print("done", flush=True)
"""


def test_process_sets_of_communicators(one_of_two):
    status, output = finish(mpirun(one_of_two, on_hosts(SETS), np=4))
    assert status == 0, output
    assert output.count("done") == 4, output


# ---- the end ---------------------------------------------------------------------------------------------------------

ENDING = """
import signal
import sys
import time
from pathlib import Path
import numpy as np
import horoplug as hvd
hvd.init()
folder, end, operation = Path(sys.argv[1]), sys.argv[2], getattr(hvd, sys.argv[3])
x = np.ones(399_999, np.float32)
arguments = {"broadcast": {"root_rank": 0}}.get(sys.argv[3], {})
try:
    for step in range(10**9):
        operation(x, name="step", **arguments)
        if step == 30 and hvd.rank() == 1:
            if end == "leaves":
                sys.exit(0)
            (folder / "part").write_text(str(os.getpid()))
            (folder / "part").rename(folder / "pid")
except hvd.HorovodInternalError as error:
    os.write(1, f"failed: {error}\\n".encode())  # at once: mpirun may end this process next
"""


def failures(output: str) -> list[str]:
    return re.findall(r"failed: (.*)", output)


def start(
    place,
    folder: Path,
    end: str,
    algorithm: str = "",
    options=(),
    operation="allreduce",
    **variables: str,
):
    """Three ranks, of which rank 1 ends in this way."""
    return mpirun(
        place,
        on_hosts(ENDING),
        str(folder),
        end,
        operation,
        np=3,
        options=options,
        HOROVOD_CPU_OPERATIONS="mpi",
        HOROPLUG_ALGORITHM=algorithm,
        **variables,
    )


def kill(job, folder: Path, number: int) -> int:
    """Send rank 1 a signal once it has begun; returns its process number."""
    file = folder / "pid"
    until(lambda: file.exists() or job.poll() is not None, timeout=40)
    assert job.poll() is None, job.communicate()[0]
    pid = int(file.read_text())
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [
        ("allreduce", "pairwise"),
        *((operation, "mpi") for operation in ("allreduce", "broadcast", "allgather", "alltoall")),
    ],
)
def test_a_rank_that_dies(one_of_two, tmp_path, operation, algorithm):
    """Everybody else hears which one it was, and all processes end. MPICH's mpirun may end them before they say so."""
    kept = one_of_two.name == "openmpi"
    options = ["--continuous" if kept else "-disable-auto-cleanup"]
    # Open MPI's MPI_Finalize may wait for who is dead.
    limits = NO_LIMITS | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
    job = start(one_of_two, tmp_path, "dies", algorithm, options, operation, **limits)
    kill(job, tmp_path, signal.SIGKILL)
    status, output = finish(job)
    assert kept or status != 0, output
    assert len(failures(output)) == 2 or not kept, output
    assert all("rank 1 has died" in text for text in failures(output)), output


@pytest.mark.parametrize("algorithm", ["pairwise", "mpi"])
def test_a_rank_that_stops(mpich, tmp_path, algorithm):
    """The others fail, and do not wait for it in MPI_Finalize."""
    job = start(mpich, tmp_path, "stops", algorithm, HOROVOD_GLOO_TIMEOUT_SECONDS="2")
    pid = kill(job, tmp_path, signal.SIGSTOP)
    try:
        _, output = finish(job)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert "MPI_Finalize has not returned for 2 s" in output, output
    assert len(failures(output)) == 2, output
    # MPI's own collectives do not say who is late.
    assert all(
        re.search(r"no progress for 2 s, waiting for ranks? [\d, -]*", t) for t in failures(output)
    )


def test_a_rank_that_leaves(one_of_two, tmp_path):
    status, output = finish(start(one_of_two, tmp_path, "leaves"))
    assert status == 0, output
    assert len(failures(output)) == 2, output
    assert all("rank 1" in text for text in failures(output)), output


@pytest.mark.parametrize(("mpi", "level"), [("openmpi", "multiple"), ("mpich", "serialized")])
def test_nothing_is_done_while_nothing_is_to_be_done(mpi, level):
    script = """
import resource
import time
import numpy as np
import horoplug as hvd

def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

hvd.init()
for _ in range(50):
    hvd.allreduce_(np.ones(100_000, np.float32), name="step")
handle = hvd.allreduce_async(np.ones(100), name="late") if hvd.rank() else None
def quiet():  # whether nothing has happened in a second
    before, wakeups = used(), hvd.common.context.context.engine().stats()["wakeups"]
    time.sleep(1.0)
    more = hvd.common.context.context.engine().stats()["wakeups"] - wakeups
    took = used() - before
    return took < 0.03 and more < 20
# On a busy machine the other rank may still be at the steps before.
assert any(quiet() for _ in range(5))
if handle is None:
    handle = hvd.allreduce_async(np.ones(100), name="late")
hvd.synchronize(handle)
for _ in range(20):
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(np.ones(70_000), op=hvd.Sum)[-1] == 2
print("done", flush=True)
"""
    script = f"import mpi4py; mpi4py.rc.thread_level = {level!r}\n" + on_hosts(script)
    status, output = finish(mpirun(find(mpi), script, HOROVOD_CPU_OPERATIONS="mpi"))
    assert status == 0, output
    assert output.count("done") == 2, output
