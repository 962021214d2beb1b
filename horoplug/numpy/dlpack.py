"""DLPack: imports GPU arrays that offer no other interface, and exports horoplug's GPU arrays to other libraries."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from horoplug._native import DlpackTensor, give_dlpack, take_dlpack
from horoplug.common import dtypes

ON_CUDA: Final = 2  # kDLCUDA
LEGACY_STREAM: Final = 1  # the default stream in DLPack and in __cuda_array_interface__
_NO_ORDER: Final = -1

# Rows by DLPack's (type code, bits), and the reverse.
_ROWS: Final = {(row.dlpack, 8 * row.size): row for row in dtypes.ROWS}
_OF_NAMES: Final = {row.name: key for key, row in _ROWS.items()}


def take(tensor: Any) -> DlpackTensor:
    """Import the array that ``tensor.__dlpack__`` exports, for use in the default stream. Raises ValueError if the
    export fails."""
    try:
        try:
            capsule = tensor.__dlpack__(stream=LEGACY_STREAM, max_version=(1, 0))
        except TypeError:  # implements a version before 1
            capsule = tensor.__dlpack__(stream=LEGACY_STREAM)
        return take_dlpack(capsule)
    except BufferError as error:
        name = type(tensor).__name__
        raise ValueError(f"the array of {name} cannot be read through DLPack: {error}") from None


def dtype_of(taken: DlpackTensor) -> np.dtype[Any]:
    """The NumPy dtype of the array. Raises ValueError if the core does not support it."""
    code, bits, lanes = taken.dtype
    row = _ROWS.get((code, bits)) if lanes == 1 else None
    if row is None:
        raise dtypes.unsupported(f"{code}:{bits}x{lanes} of DLPack", dtypes.NAMES)
    if row.package == "numpy":
        return np.dtype(row.name)
    try:
        found: np.dtype[Any] = np.dtype(getattr(importlib.import_module(row.package), row.name))
        return found
    except ImportError:
        raise ValueError(f"NumPy has {row.name} from {row.package}; install it") from None


def give(
    array: Any,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
) -> object:
    """The capsule of a :class:`horoplug.numpy.cuda.DeviceArray`. The arguments are those of ``__dlpack__``."""
    device = ON_CUDA, array.device
    if copy or (dl_device is not None and tuple(dl_device) != device):
        raise BufferError("a DeviceArray is exported without a copy, on its own GPU only")
    key = _OF_NAMES.get(array.dtype.name)
    if key is None:
        raise BufferError(f"DLPack has no {array.dtype}")
    if stream != _NO_ORDER:
        of = 0 if stream is None or stream == LEGACY_STREAM else stream
        if of != array.stream:
            _order_after(array.device, of, array.stream)
    versioned = max_version is not None and max_version[0] >= 1
    return give_dlpack(array, array.address, device, key, array.shape, versioned)


def _order_after(device: int, stream: int, other: int) -> None:
    """Order later work in ``stream`` after the current work in ``other``. Raises BufferError if the driver fails."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, event = ctypes.c_void_p(), ctypes.c_void_p()

    def call(function: Callable[..., int], *arguments: object) -> None:
        status = function(*arguments)
        if status != 0:
            name = getattr(function, "__name__", "a function of the CUDA driver")
            raise BufferError(f"{name} fails with {status}")

    call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
    try:
        call(driver.cuCtxPushCurrent_v2, context)
        try:
            call(driver.cuEventCreate, ctypes.byref(event), 2)  # CU_EVENT_DISABLE_TIMING
            call(driver.cuEventRecord, event, ctypes.c_void_p(other))
            call(driver.cuStreamWaitEvent, ctypes.c_void_p(stream), event, 0)
        finally:
            driver.cuEventDestroy_v2(event)
            driver.cuCtxPopCurrent_v2(None)
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
