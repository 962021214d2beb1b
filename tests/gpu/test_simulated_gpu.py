"""The simulated GPUs themselves: their libraries are found, and processes share memory, events and communicators."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from tests.harness import simulated_gpu
from tests.harness.limits import scaled
from tests.harness.support import Pool, environment

COUNT = 1000


@pytest.fixture
def pool(tmp_path):
    made = Pool(variables=simulated_gpu.environment(tmp_path, gpu_count=2))
    yield made
    made.close()


def test_simulated_libraries_are_found(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "horoplug.runner", "--check-build", "--verbose"],
        env=environment() | simulated_gpu.environment(tmp_path, gpu_count=2),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    for text in (
        "[X] CUDA driver 12.4: Simulated GPU (sm_90, 1 GiB), Simulated GPU (sm_90, 1 GiB)",
        "[X] NVRTC 12.99",
        "[X] NCCL 2.30.3",
    ):
        assert text in done.stdout
    assert str(simulated_gpu.LIBRARIES) in done.stdout


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def give():
    """Fill memory of this process, then record an event that other processes can wait for."""
    import horoplug as hvd

    device = simulated_gpu.Device()
    array = device.array(np.zeros(COUNT))
    device.synchronize()
    device.hold()
    event, of_memory, of_event = ctypes.c_void_p(), Handle(), Handle()
    device.call("cuEventCreate", ctypes.byref(event), 2 | 4)
    device.call("cuIpcGetMemHandle", ctypes.byref(of_memory), ctypes.c_uint64(array.address))
    device.call("cuIpcGetEventHandle", ctypes.byref(of_event), event)
    stream = ctypes.c_void_p(device.stream)
    device.call(
        "cuMemsetD8Async", ctypes.c_uint64(array.address), 1, ctypes.c_size_t(8 * COUNT), stream
    )
    device.call("cuEventRecord", event, stream)
    hvd.broadcast_object((bytes(of_memory), bytes(of_event)), root_rank=0)
    hvd.barrier()
    device.resume()
    hvd.barrier()  # the memory is still in use
    array.free()


def take():
    """Read the memory of the other process before and after its event has completed."""
    import horoplug as hvd

    device = simulated_gpu.Device()
    of_memory, of_event = map(Handle.from_buffer_copy, hvd.broadcast_object(None, root_rank=0))
    address, event = ctypes.c_uint64(), ctypes.c_void_p()
    device.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), of_memory, 1)
    device.call("cuIpcOpenEventHandle", ctypes.byref(event), of_event)
    array = device.empty(0, np.uint8)
    array.address, array.shape, array.nbytes = address.value, (8 * COUNT,), 8 * COUNT
    before = array.numpy()
    device.call("cuStreamWaitEvent", ctypes.c_void_p(device.stream), event, 0)
    hvd.barrier()
    after = array.numpy()
    device.call("cuIpcCloseMemHandle", address)
    hvd.barrier()
    return before.max(), after.min()


def test_memory_and_events_of_another_process(pool):
    def program():
        import horoplug as hvd

        return give() if hvd.rank() == 0 else take()

    with pool.ranks(2) as ranks:
        assert ranks.run(program)[1] == (0, 1)


def sum_by_nccl():
    """Call NCCL's allreduce directly."""
    import horoplug as hvd

    device = simulated_gpu.Device(hvd.rank())
    nccl = ctypes.CDLL(str(simulated_gpu.LIBRARIES / "libnccl.so.2"))

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]

    unique = UniqueId()
    if hvd.rank() == 0:
        assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
    unique = UniqueId.from_buffer_copy(hvd.broadcast_object(bytes(unique), root_rank=0))
    communicator = ctypes.c_void_p()
    place = ctypes.byref(communicator)
    with device.current():
        assert nccl.ncclCommInitRankConfig(place, hvd.size(), unique, hvd.rank(), None) == 0
    array = device.array(np.full(COUNT, hvd.rank() + 1, np.float32))
    data, size = ctypes.c_void_p(array.address), ctypes.c_size_t(COUNT)
    stream = ctypes.c_void_p(device.stream)
    for _ in range(10):
        assert nccl.ncclAllReduce(data, data, size, 7, 0, communicator, stream) == 0
    assert device.count("AllReduce") == 10
    total = array.numpy()
    assert nccl.ncclCommDestroy(communicator) == 0
    return float(total[0]), float(total[-1])


def test_nccl_between_processes(pool):
    with pool.ranks(2) as ranks:
        assert ranks.run(sum_by_nccl) == [(3 * 2**9, 3 * 2**9)] * 2
