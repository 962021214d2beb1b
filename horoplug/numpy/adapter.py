"""The adapter of NumPy arrays, and of arrays on GPUs, for :mod:`horoplug.common.ops`."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from horoplug._native import DeviceMemory, Memory, address_of
from horoplug.common import dtypes
from horoplug.common.arguments import check_mask
from horoplug.common.ops import CPU, Direct, Documented, perform
from horoplug.common.opspec import Call, OpSpec
from horoplug.numpy import cuda

_CODES = {np.dtype(row.name): row.code for row in dtypes.ROWS if row.package == "numpy"}
_SCALARS = (np.generic, bool, int, float, complex, list, tuple)


def _code(dtype: np.dtype[Any]) -> int:
    code = _CODES.get(dtype)
    if code is None:
        # Types of other packages (ml_dtypes) are known by name, so that the packages need not be imported.
        code = dtypes.CODES.get(dtype.name)
        if code is None or dtype.itemsize != dtypes.SIZES[dtype.name] or not dtype.isnative:
            raise dtypes.unsupported(dtype, dtypes.NAMES)
    return code


def _address(array: np.ndarray[Any, Any]) -> int:
    # NumPy's own interface takes longer than the rest of a small operation, but supports the dtypes of other packages.
    address = address_of(array)
    return array.__array_interface__["data"][0] if address is None else address


def _on_gpu(array: Any) -> tuple[int, tuple[int, ...], int]:
    address, device = cuda.location(array)
    return address, array.shape, device


def _to_array(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of different lengths
        text = " ".join(str(error).split())
        raise ValueError(f"the {type(value).__name__} cannot be made an array: {text}") from None


class NumpyAdapter:
    """See :class:`horoplug.common.ops.Adapter`. Numbers and lists of numbers are converted to arrays.

    A tensor of any other class than ``np.ndarray`` is on a GPU: see :mod:`horoplug.numpy.cuda`."""

    tensor_type = np.ndarray
    documented = Documented(
        tensor="a NumPy array or an array on a GPU (not in place: or a number or a list of numbers)",
        dtypes="bool, (u)int8 to (u)int64, float16 to float64, complex64, complex128; with ml_dtypes also bfloat16, "
        "float8_e4m3fn and float8_e5m2",
        make="np.array",
    )
    compression = None
    direct = Direct(
        np.ndarray, None, np.empty_like, lambda like, shape: np.empty(shape, like.dtype)
    )

    def describe(self, tensor: Any, in_place: bool) -> tuple[Any, int, int, tuple[int, ...], int]:
        if type(tensor) is not np.ndarray:
            check_mask(tensor)
            if not isinstance(tensor, (np.ndarray, *_SCALARS)):
                array = cuda.array(tensor, in_place)
                return (array, _code(array.dtype), *_on_gpu(array))
            if in_place and not isinstance(tensor, np.ndarray):
                raise TypeError(f"expected a NumPy array, got {type(tensor).__name__}")
            tensor = _to_array(tensor)
        code = _code(tensor.dtype)
        if not tensor.flags.c_contiguous:
            if in_place:
                raise ValueError(
                    "Tensor is required to be contiguous. Pass an array in C order "
                    "(np.ascontiguousarray(x)), or use the variant that returns a new array"
                )
            tensor = np.ascontiguousarray(tensor)
        if in_place and not tensor.flags.writeable:
            raise ValueError(
                "the array is read-only; pass a copy, or use the variant that returns one"
            )
        return tensor, code, _address(tensor), tensor.shape, CPU

    def stream(self, device: int, tensors: Sequence[Any]) -> int:
        return cuda.stream(device, tensors)

    def empty_like(self, tensor: Any) -> tuple[Any, int]:
        if not isinstance(tensor, np.ndarray):
            return cuda.empty_like(tensor)
        made = np.empty(tensor.shape, tensor.dtype)
        return made, _address(made)

    def copy_back(self, result: Any, tensor: Any) -> None:
        if isinstance(result, np.ndarray):
            np.copyto(tensor, result)
        else:
            cuda.copy_back(result, tensor)

    def from_memory(
        self, memory: Memory | DeviceMemory | None, like: Any, shape: Sequence[int]
    ) -> Any:
        if not isinstance(like, np.ndarray):
            assert not isinstance(memory, Memory)
            return cuda.from_memory(memory, like, shape)
        if memory is None:
            return np.empty(shape, like.dtype)
        array: np.ndarray[Any, Any] = np.frombuffer(cast(memoryview, memory), like.dtype)
        return array.reshape(shape)

    def to_counts(self, splits: Any) -> list[int]:
        try:
            counts = np.asarray(splits)
        except ValueError:  # lists of different lengths
            counts = np.empty(())
        if counts.ndim != 1 or counts.dtype.kind not in "iu":
            raise ValueError("splits= takes one integer for each rank")
        return [int(count) for count in counts]

    def from_counts(self, counts: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.array(counts, np.int32)

    def run(self, spec: OpSpec, tensors: Sequence[Any], call: Call, grouped: bool) -> Any:
        return perform(self, spec, tensors, call, grouped)
