"""Operations on CuPy arrays, compared with the same operations on NumPy arrays."""

import importlib.util

import numpy as np

import horoplug as hvd
from tests.gpu.device.device_jobs import gpu_pool as gpu_pool
from tests.gpu.device.device_jobs import ranks as ranks


def need():
    """Why these tests cannot run here; None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    return None if cupy.cuda.is_available() else "CuPy finds no CUDA device"


def cupy_on_own_gpu():
    """The module cupy, with this rank's GPU as the current device."""
    import cupy

    device = cupy.cuda.Device(hvd.local_rank() % cupy.cuda.runtime.getDeviceCount())
    device.use()
    return cupy


def check_operations(dtype):
    cupy, rank, size = cupy_on_own_gpu(), hvd.rank(), hvd.size()
    host = np.random.default_rng(rank).integers(0, 5, (2 * size, 3)).astype(dtype)

    def equal(found, expected):
        assert isinstance(found, cupy.ndarray)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(cupy.asnumpy(found), expected)

    for op in hvd.Sum, hvd.Min, hvd.Max:
        equal(hvd.allreduce(cupy.asarray(host), op=op), hvd.allreduce(host, op=op))
    mine = cupy.asarray(host)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    equal(mine, hvd.allreduce(host, op=hvd.Sum))
    equal(hvd.allreduce(cupy.asarray(host).T, op=hvd.Sum), hvd.allreduce(host.T, op=hvd.Sum))
    equal(hvd.broadcast(cupy.asarray(host), size - 1), hvd.broadcast(host, size - 1))
    equal(hvd.allgather(cupy.asarray(host[:rank])), hvd.allgather(host[:rank]))
    equal(hvd.alltoall(cupy.asarray(host)), hvd.alltoall(host))
    equal(hvd.reducescatter(cupy.asarray(host), op=hvd.Sum), hvd.reducescatter(host, op=hvd.Sum))
    found = hvd.grouped_allreduce([cupy.asarray(host), host], op=hvd.Sum)
    equal(found[0], found[1])


def check_streams():
    cupy = cupy_on_own_gpu()
    side = cupy.cuda.Stream(non_blocking=True)
    results = []
    for turn in range(10):
        with side:
            array = cupy.full(100_000, float(hvd.rank() + turn), np.float32)
            handle = hvd.allgather_async(array, name="x")
            del array
        other = cupy.cuda.Stream(non_blocking=True)
        with other:
            results.append(hvd.synchronize(handle).sum())
    cupy.cuda.runtime.deviceSynchronize()
    total = sum(range(hvd.size()))
    assert [float(r) for r in results] == [
        100_000.0 * (total + turn * hvd.size()) for turn in range(10)
    ]
