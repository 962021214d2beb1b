"""Operations on arrays of a simulated GPU, compared with the same operations on NumPy arrays."""

import itertools

import numpy as np
import pytest

import horoplug as hvd
from horoplug.common.batch import Batch, prepare
from horoplug.common.opspec import BY_NAME, Call
from tests.harness import simulated_gpu
from tests.harness.simulated_jobs import device

FLOAT32 = 7


def values(dtype, shape, key=0):
    """This rank's array of small integers, whose sums are exact in every dtype."""
    made = np.random.default_rng([key, hvd.rank()]).integers(0, 2 if dtype == "bool" else 5, shape)
    return np.asarray(made).astype(dtype)


def on_host(array):
    """A copy of a result in host memory, made in stream order."""
    found = simulated_gpu.Array(device(), (0,), array.dtype)
    found.address, found.shape, found.stream = array.address, array.shape, array.stream
    found.nbytes = int(np.prod(array.shape)) * array.dtype.itemsize
    return found.numpy() if found.nbytes else np.empty(array.shape, array.dtype)


def equal(array, expected):
    found = on_host(array)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def check_operations(dtype):
    rank, size, number = hvd.rank(), hvd.size(), itertools.count()
    ops = [hvd.Max, hvd.Min] if dtype == "bool" else [hvd.Sum, hvd.Max, hvd.Average]
    for shape, op in itertools.product([(1,), (5, 3), (3000, 7), (0, 2)], ops):
        mine = values(dtype, shape, next(number))
        expected = hvd.allreduce(mine, op=op)
        array = device().array(mine)
        equal(hvd.allreduce(array, op=op), expected)
        equal(array, mine)
        assert hvd.allreduce_(array, op=op) is array
        equal(array, expected)
    mine = values(dtype, (2 * size, 3), next(number))
    for root in range(size):
        equal(hvd.broadcast(device().array(mine), root), hvd.broadcast(mine, root))
    equal(hvd.allgather(device().array(mine[:rank])), hvd.allgather(mine[:rank]))
    equal(hvd.alltoall(device().array(mine)), hvd.alltoall(mine))
    splits = [rank + 1] + [1] * (size - 1)
    rows = values(dtype, (sum(splits), 2), next(number))
    found, counts = hvd.alltoall(device().array(rows), splits=splits)
    expected, expected_counts = hvd.alltoall(rows, splits=splits)
    equal(found, expected)
    assert counts.tolist() == expected_counts.tolist()
    if dtype != "bool":
        scattered = hvd.reducescatter(device().array(mine), op=hvd.Sum)
        equal(scattered, hvd.reducescatter(mine, op=hvd.Sum))
    check_rooted(dtype, mine)


def check_rooted(dtype, mine):
    """reduce, gather, scatter, send and recv."""
    rank, size = hvd.rank(), hvd.size()
    for root in {0, size - 1}:
        array = device().array(mine)
        expected = hvd.reduce(mine, root, op=hvd.Max)
        equal(hvd.reduce(array, root, op=hvd.Max), expected)
        assert hvd.reduce_(array, root, op=hvd.Max) is array
        equal(array, expected)
        equal(
            hvd.gather(device().array(mine[: rank + 1]), root), hvd.gather(mine[: rank + 1], root)
        )
        splits = [1] * (size - 1) + [size + 1] if rank == root else None
        equal(hvd.scatter(device().array(mine), root, splits), hvd.scatter(mine, root, splits))
    handle = hvd.send_async(device().array(mine), (rank + 1) % size)
    array, on_cpu = device().array(np.zeros_like(mine)), np.zeros_like(mine)
    assert hvd.recv(array, (rank - 1) % size) is array
    hvd.synchronize(handle)
    handle = hvd.send_async(mine, (rank + 1) % size)
    equal(array, hvd.recv(on_cpu, (rank - 1) % size))
    hvd.synchronize(handle)


def check_many():
    """Many operations in flight, repeated until they become a plan."""
    for _ in range(8):
        mine = [values("float32", (n * 37,), n) for n in range(20)]
        arrays = [device().array(each) for each in mine]
        handles = [hvd.allreduce_async_(a, op=hvd.Sum, name=f"n{n}") for n, a in enumerate(arrays)]
        for handle, array, each in zip(handles, arrays, mine, strict=True):
            assert hvd.synchronize(handle) is array
            equal(array, hvd.allreduce(each, op=hvd.Sum, name="host"))
            array.free()


def check_batches():
    """Like gradients, tensors are submitted together in one stream and used in another one."""
    side = device().new_stream()
    prepared = [
        prepare(BY_NAME["allreduce"], Call(f"b{n}", hvd.Sum), FLOAT32, (n * 50,), device().ordinal)
        for n in range(10)
    ]
    for _ in range(8):
        mine = [values("float32", (n * 50,), n) for n in range(10)]
        arrays = [device().array(each, stream=side) for each in mine]
        streams = iter([side, device().stream]).__next__
        batch = Batch(prepared, [a.address for a in arrays], arrays, streams)
        assert batch.refused is None
        assert batch.wait() is None
        for array, each in zip(arrays, mine, strict=True):
            array.stream = device().stream
            equal(array, hvd.allreduce(each, op=hvd.Sum, name="host"))
            array.free()


def check_groups():
    mine = [
        values(dtype, shape, 3)
        for dtype in ("float32", "int32")
        for shape in [(7,), (100, 3), (0,)]
    ]
    expected = hvd.grouped_allreduce(mine, op=hvd.Sum, name="host")
    arrays = [device().array(each) for each in mine]
    for found, wanted in zip(hvd.grouped_allreduce(arrays, op=hvd.Sum), expected, strict=True):
        equal(found, wanted)
    # Some tensors on the GPU, some on the host.
    mixed = [
        each if n % 2 else array for n, (each, array) in enumerate(zip(mine, arrays, strict=True))
    ]
    for found, wanted in zip(hvd.grouped_allreduce(mixed, op=hvd.Sum), expected, strict=True):
        if isinstance(found, np.ndarray):
            assert found.tobytes() == wanted.tobytes()
        else:
            equal(found, wanted)


def check_streams():
    """Results are used in the array's stream while the GPU is delayed."""
    stream = device().new_stream()
    for turn in range(3):
        mine = values("float32", (5000,), turn)
        device().delay(0.05, stream)
        array = device().array(mine, stream=stream)
        equal(hvd.allreduce(array, op=hvd.Sum), hvd.allreduce(mine, op=hvd.Sum, name="host"))


def check_join():
    """Only the last rank still has arrays on its GPU; the joined ranks take part with GPUs that they have not used."""
    last = hvd.size() - 1
    if hvd.rank() == last:
        for n in range(3):
            mine = values("float32", (100,), n)
            equal(hvd.allreduce(device().array(mine), op=hvd.Sum), mine)
            equal(hvd.allgather(device().array(mine)), mine)
    assert hvd.join() == last


def check_mismatch():
    """Host memory on one rank and GPU memory on another are a mismatch: every rank gets an error, and the job
    continues."""
    mine = values("float32", (4,))
    given = mine if hvd.rank() == 0 else device().array(mine)
    with pytest.raises(hvd.HorovodInternalError, match=r"(?is)device.*[cg]pu.*rank"):
        hvd.allreduce(given, name="where")
    equal(hvd.allreduce(device().array(mine), op=hvd.Sum), hvd.allreduce(mine, op=hvd.Sum))
