"""Simulated GPUs for jobs of several processes: replacements for libcuda, NVRTC and NCCL, and arrays on these GPUs.

    with Pool(variables=simulated_gpu.environment(folder)) as pool: ...   # in the test
    device = simulated_gpu.Device(0); array = device.array(numpy_array)         # in a process of the job

The libraries are those of ``csrc/tests/stubs/simulated_*.cc``, which ``make cpp`` builds and which describe
the simulation. Streams run independently and with delays, operations of NCCL wait for all ranks, and misuse of CUDA
ends the process with a message that begins with "simulated GPU:".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness import ROOT

LIBRARIES = ROOT / "build" / "release" / "stubs" / "simulated"
_NAMES = ("libcuda.so.1", "libnvrtc.so.12", "libnccl.so.2")

_ADDRESS = ctypes.c_uint64
_POINTER = ctypes.c_void_p


def environment(folder: Path, **settings: int | str) -> dict[str, str]:
    """Variables with which the processes of a job find the libraries and share memory in ``folder``, which is empty.

    ``settings``: properties of the GPUs, listed in ``simulated_cuda.cc`` and ``simulated_nccl.cc``: ``gpu_count=2``,
    ``gpu_same=1``, ``nccl_late=0``."""
    missing = [name for name in _NAMES if not (LIBRARIES / name).exists()]
    if missing:
        raise FileNotFoundError(f"{LIBRARIES / missing[0]} is not built: run make cpp")
    path = os.pathsep.join(filter(None, [str(LIBRARIES), os.environ.get("LD_LIBRARY_PATH")]))
    return {
        "LD_LIBRARY_PATH": path,
        "SIMULATED_GPU_FOLDER": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),  # of kernels
        **{f"SIMULATED_{name.upper()}": str(value) for name, value in settings.items()},
    }


def load() -> ctypes.CDLL:
    """Load the libraries, like a framework that runs on these GPUs, and return that of the driver."""
    driver, *_ = [ctypes.CDLL(str(LIBRARIES / name)) for name in _NAMES]
    return driver


class Device:
    """A GPU with its own stream, independent of the default stream. Failures raise ``RuntimeError``."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._driver = load()
        self._context = _POINTER()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self.stream = self.new_stream()

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed with {result}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context of this GPU current in the thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", None)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver, by its symbol, in the context of this GPU."""
        with self.current():
            self._call(name, *arguments)

    def new_stream(self) -> int:
        """Create a stream and return its handle."""
        made = _POINTER()
        self.call("cuStreamCreateWithPriority", ctypes.byref(made), 1, 0)
        assert made.value
        return made.value

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for all work in a stream, by default the GPU's own."""
        self.call("cuStreamSynchronize", _POINTER(self.stream if stream is None else stream))

    def delay(self, seconds: float, stream: int | None = None) -> None:
        """Enqueue a pause of this length on a stream."""
        handle = _POINTER(self.stream if stream is None else stream)
        self.call("simulated_gpu_delay", handle, int(seconds * 1e6))

    def order(self, stream: Any, other: int) -> None:
        """Make later work in a stream wait for the current work in another one."""
        event = _POINTER()
        self.call("cuEventCreate", ctypes.byref(event), 2)
        self.call("cuEventRecord", event, _POINTER(other))
        self.call("cuStreamWaitEvent", _POINTER(stream), event, 0)
        self.call("cuEventDestroy_v2", event)

    def hold(self) -> None:
        """Stop this process's streams from starting further work, until :meth:`resume`."""
        self._driver.simulated_gpu_pause()

    def resume(self) -> None:
        """Let the streams continue after :meth:`hold`."""
        self._driver.simulated_gpu_resume()

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """An uninitialised array."""
        return Array(self, (shape,) if isinstance(shape, int) else shape, np.dtype(dtype))

    def array(self, values: Any, dtype: Any = None, stream: int | None = None) -> Array:
        """A copy on the GPU, made in a stream: later work in that stream sees it."""
        source = np.ascontiguousarray(values, dtype)
        made = self.empty(source.shape, source.dtype)
        made.stream = self.stream if stream is None else stream
        address = _ADDRESS(made.address)
        data = source.ctypes.data_as(_POINTER)
        size = ctypes.c_size_t(source.nbytes)
        # Pageable memory, which is copied before the call returns.
        self.call("cuMemcpyHtoDAsync_v2", address, data, size, _POINTER(made.stream))
        return made

    def fail(self, function: str, result: int) -> None:
        """Make all calls of a function fail: ``fail("cuMemAlloc", 2)``; 0 ends this."""
        self._driver.simulated_gpu_fail(function.encode(), result)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """The GPU's own stream acts as if it were being captured into a graph."""
        self.call("simulated_gpu_capture", _POINTER(self.stream), 1)
        try:
            yield
        finally:
            self.call("simulated_gpu_capture", _POINTER(self.stream), 0)

    def lose_device(self) -> None:
        """Fail all calls from now on, as if the GPU had fallen off the bus."""
        self._driver.simulated_gpu_lose_device(999)

    def host_waits(self) -> int:
        """The number of driver calls in which this process has waited for a stream, or might have."""
        return int(self._driver.simulated_gpu_host_waits())

    def count(self, what: str) -> int:
        """How often an action was enqueued: a kernel or NCCL operation by name, or "copy to the GPU"."""
        return int(self._driver.simulated_gpu_count(what.encode()))


class Array:
    """A contiguous array in GPU memory, with ``__cuda_array_interface__``."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        self.size = int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize
        self.stream = device.stream
        address = _ADDRESS()
        if self.nbytes > 0:
            size = ctypes.c_size_t(self.nbytes)
            device.call("cuMemAlloc_v2", ctypes.byref(address), size)
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "stream": self.stream,
        }

    def numpy(self, stream: int | None = None) -> np.ndarray[Any, Any]:
        """A copy on the host, made in a stream; waits for the stream."""
        values = np.empty(self.shape, self.dtype)
        data = values.ctypes.data_as(_POINTER)
        size = ctypes.c_size_t(self.nbytes)
        handle = _POINTER(self.stream if stream is None else stream)
        self.device.call("cuMemcpyDtoHAsync_v2", data, _ADDRESS(self.address), size, handle)
        return values

    def free(self) -> None:
        """Free the memory when the GPU is done with it."""
        if self.address:
            self.device.call("cuMemFree_v2", _ADDRESS(self.address))
            self.address = 0
