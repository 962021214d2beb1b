"""Arrays in the memory of CUDA devices: CuPy's, and any that has ``__cuda_array_interface__`` or ``__dlpack__``.

Results are arrays of CuPy for arrays of CuPy, and a :class:`DeviceArray` for all others. CuPy is never imported."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from horoplug._native import DeviceMemory, Error
from horoplug.common.arguments import not_a_tensor
from horoplug.common.context import context
from horoplug.common.per_job import PerJob
from horoplug.common.status import exception
from horoplug.numpy import dlpack

# By the package of an array's class: the module of horoplug for its arrays.
_MODULES: Final = {
    "jax": "horoplug.jax",
    "jaxlib": "horoplug.jax",
    "tensorflow": "horoplug.tensorflow",
    "torch": "horoplug.torch",
}
_USED: Final = PerJob[list[int]](list)
"""The GPU that this rank uses, once it is known."""
_DEVICE_ORDINAL: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NO_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT: no GPU is current in this thread


class DeviceArray:
    """A dense array on a GPU, in row-major order: the memory of another library's array, or a result of an operation.

    ``cupy.asarray``, ``numba.cuda.as_cuda_array``, ``torch.as_tensor(..., device="cuda")`` and the ``from_dlpack`` of
    every library accept it without a copy."""

    def __init__(
        self,
        owner: Any,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        device: int,
        stream: int,
    ) -> None:
        self.owner = owner  # keeps the memory alive
        self.address = address
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.stream = stream
        """The stream (a CUstream; 0: the default stream) whose pending work produces the array. Work that uses the
        array must run after that work."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": self.stream or dlpack.LEGACY_STREAM,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.ON_CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        return dlpack.give(self, stream, max_version, dl_device, copy)


def array(tensor: Any, in_place: bool) -> Any:
    """Convert an array on a GPU to an array of CuPy or a :class:`DeviceArray`, dense and in row-major order.

    Raises TypeError for anything else, ValueError if the array cannot be overwritten (``in_place``) or copied."""
    package = type(tensor).__module__.partition(".")[0]
    if package in _MODULES:
        raise TypeError(
            f"expected a NumPy array, got {type(tensor).__name__}; import {_MODULES[package]} as hvd for those"
        )
    if isinstance(tensor, DeviceArray):
        return tensor
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(tensor, cupy.ndarray):
        interface = getattr(tensor, "__cuda_array_interface__", None)
        if interface is not None:
            return _wrapped(tensor, interface, in_place)
        return _taken(tensor, in_place)
    if tensor.flags.c_contiguous:
        return tensor
    if in_place:
        raise _not_in_order()
    with cupy.cuda.Device(tensor.device.id):
        return cupy.ascontiguousarray(tensor)


def location(tensor: Any) -> tuple[int, int]:
    """Address and device of an array that :func:`array` has returned."""
    if isinstance(tensor, DeviceArray):
        return tensor.address, tensor.device
    return int(tensor.data.ptr), int(tensor.device.id)


def stream(device: int, tensors: Sequence[Any]) -> int:
    """The stream in which arrays are used: CuPy's current stream, or that of a DeviceArray. Raises ValueError if the
    arrays are used in several streams."""
    found = {t.stream if isinstance(t, DeviceArray) else _current(device) for t in tensors}
    if len(found) != 1:
        raise ValueError(
            "the arrays of a group are used in different streams; use one stream, or pass the arrays one by one"
        )
    return found.pop()


def empty_like(tensor: Any) -> tuple[Any, int]:
    """A new array for a result, and its address."""
    if isinstance(tensor, DeviceArray):
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        memory = None
        if nbytes:
            try:
                memory = context.engine().device_allocate(tensor.device, nbytes, tensor.stream)
            except Error as error:
                raise exception(error) from None
        made = from_memory(memory, tensor, tensor.shape)
        return made, made.address
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(tensor.device.id):
        result = cupy.empty(tensor.shape, tensor.dtype)
    return result, int(result.data.ptr)


def copy_back(result: Any, tensor: Any) -> None:
    """Copy a result to the caller's array. Does nothing for a :class:`DeviceArray`, which is never a copy."""
    if not isinstance(result, DeviceArray):
        tensor[...] = result


def from_memory(memory: DeviceMemory | None, like: Any, shape: Sequence[int]) -> Any:
    """An array that wraps memory of the core."""
    address = memory.address if memory else 0
    if isinstance(like, DeviceArray):
        return DeviceArray(memory, address, shape, like.dtype, like.device, like.stream)
    cupy, device = sys.modules["cupy"], int(like.device.id)
    if memory is None or memory.nbytes == 0:
        with cupy.cuda.Device(device):
            return cupy.empty(shape, like.dtype)
    owner = memory, _current(device)  # the memory is freed in the order of this stream
    unowned = cupy.cuda.UnownedMemory(address, memory.nbytes, owner, device)
    return cupy.ndarray(tuple(shape), like.dtype, cupy.cuda.MemoryPointer(unowned, 0))


class _Stream(int):
    """A CUstream with a reference to the object that keeps it alive."""

    keeper: Any


def _current(device: int) -> _Stream:
    """CuPy's current stream."""
    keeper = sys.modules["cupy"].cuda.get_current_stream(device)
    stream = _Stream(keeper.ptr)
    stream.keeper = keeper
    return stream


def _wrapped(tensor: Any, interface: dict[str, Any], in_place: bool) -> DeviceArray:
    address, read_only = interface["data"]
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise ValueError("the array has a mask, which operations would ignore")
    if not _in_order(interface.get("strides"), shape, dtype.itemsize):
        raise _not_in_order()
    if in_place and read_only:
        raise _read_only()
    of = interface.get("stream")
    ready_in = 0 if of is None or of == dlpack.LEGACY_STREAM else int(of)
    return DeviceArray(tensor, address or 0, shape, dtype, _device(tensor, address), ready_in)


def _taken(tensor: Any, in_place: bool) -> DeviceArray:
    """Convert an array that has only the DLPack interface. The result is ready in the default stream. Raises TypeError
    if the array is not on a GPU."""
    asked = getattr(tensor, "__dlpack_device__", None)
    if asked is None or not hasattr(tensor, "__dlpack__") or asked()[0] != dlpack.ON_CUDA:
        raise not_a_tensor("a NumPy array", tensor, "np.asarray")
    taken = dlpack.take(tensor)
    dtype, shape = dlpack.dtype_of(taken), taken.shape
    if not _in_order(taken.strides, shape, 1):
        raise _not_in_order()
    if in_place and (taken.read_only or taken.copied):
        raise _read_only()
    return DeviceArray(taken, taken.address, shape, dtype, taken.device[1], 0)


def _in_order(strides: Sequence[int] | None, shape: Sequence[int], itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = itemsize
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count != 1 and stride != expected:
            return False
        expected *= count
    return True


def _read_only() -> ValueError:
    return ValueError("the array is read-only; pass a copy, or use the variant that returns one")


def _not_in_order() -> ValueError:
    return ValueError(
        "Tensor is required to be contiguous. Pass an array in C order, or use CuPy's arrays and the variant that "
        "returns a new one"
    )


def _device(tensor: Any, address: int | None) -> int:
    """The GPU of an array; ``__cuda_array_interface__`` does not contain it. An array without elements has no memory:
    it is taken to be on the GPU that this rank uses, or else on the GPU that is current in this thread: GPU 0, if the
    thread has not chosen one.

    Raises ValueError if the CUDA driver knows no device for the array."""
    if hasattr(tensor, "__dlpack_device__"):
        return int(tensor.__dlpack_device__()[1])
    used = _USED.get()
    if not address and used:
        return used[0]
    ordinal, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    if address:
        status = driver.cuPointerGetAttribute(
            ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(address)
        )
    else:
        status = driver.cuCtxGetDevice(ctypes.byref(ordinal))
        if status == _NO_CONTEXT:
            return 0
    if status != 0:
        raise ValueError(f"the array is not on a CUDA device (the CUDA driver returned {status})")
    used[:] = [ordinal.value]
    return ordinal.value
