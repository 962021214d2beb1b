"""The adapter of MXNet's NDArrays for :mod:`horoplug.common.ops`.

MXNet's engine computes in threads of its own, so an array may not have its values yet, or may still be read. Before
the core uses its memory, the adapter waits for both. The core's operations do not pass through the engine: when one
returns, its result is there."""

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from horoplug._native import DeviceMemory, Memory
from horoplug.common import dtypes
from horoplug.common.ops import CPU, Documented, perform
from horoplug.common.opspec import Call, OpSpec

_CODES = {
    np.dtype(name): dtypes.CODES[name]
    for name in ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool")
}
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # MXNet's own
_CODES[_BFLOAT16] = dtypes.CODES["bfloat16"]


def check(tensor: Any) -> None:
    """Raises TypeError or ValueError for what is not a dense NDArray in host memory."""
    if not isinstance(tensor, mx.nd.NDArray):
        raise TypeError(f"expected an NDArray of MXNet, got {type(tensor).__name__}")
    if tensor.stype != "default":
        raise ValueError(
            f"NDArrays of storage type {tensor.stype!r} are not supported; pass x.tostype('default')"
        )
    if tensor.context.device_type not in ("cpu", "cpu_pinned", "cpu_shared"):
        raise ValueError(
            f"NDArrays on {tensor.context} are not supported; pass x.as_in_context(mx.cpu())"
        )


def code_of(tensor: Any) -> int:
    code = _CODES.get(np.dtype(tensor.dtype))
    if code is None:
        raise dtypes.unsupported(np.dtype(tensor.dtype), dtypes.NAMES)
    return code


def address(tensor: Any) -> int:
    """The address of a dense NDArray's memory. Arrays in a layout of MKL-DNN get the usual one."""
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(pointer)))
    return pointer.value or 0


class MXNetAdapter:
    """See :class:`horoplug.common.ops.Adapter`."""

    tensor_type = mx.nd.NDArray
    documented = Documented(
        tensor="a dense NDArray in host memory",
        dtypes="bool, uint8, int8, int32, int64, float16, bfloat16, float32, float64",
        make="mx.nd.array",
    )
    compression = None
    direct = None

    def describe(self, tensor: Any, in_place: bool) -> tuple[Any, int, int, tuple[int, ...], int]:
        check(tensor)
        code = code_of(tensor)
        # Waiting to write also waits for those who read.
        wait = _LIB.MXNDArrayWaitToWrite if in_place else _LIB.MXNDArrayWaitToRead
        check_call(wait(tensor.handle))
        return tensor, code, address(tensor), tensor.shape, CPU

    def stream(self, device: int, tensors: Sequence[Any]) -> int:
        raise NotImplementedError  # no tensor is on a GPU

    def empty_like(self, tensor: Any) -> tuple[Any, int]:
        made = _empty(tensor.shape, tensor)
        return made, address(made)

    def copy_back(self, result: Any, tensor: Any) -> None:
        raise NotImplementedError  # describe() makes no copies

    def from_memory(
        self, memory: Memory | DeviceMemory | None, like: Any, shape: Sequence[int]
    ) -> Any:
        made = _empty(tuple(shape), like)
        if memory is not None:
            assert isinstance(memory, Memory)
            ctypes.memmove(address(made), memory.address, memory.nbytes)
        return made

    def to_counts(self, splits: Any) -> list[int]:
        counts = splits.asnumpy() if isinstance(splits, mx.nd.NDArray) else np.asarray(splits)
        if counts.ndim != 1 or counts.dtype.kind not in "iuf" or (counts % 1).any():
            raise ValueError("splits= takes one integer for each rank")
        return [int(count) for count in counts]

    def from_counts(self, counts: Sequence[int]) -> Any:
        return mx.nd.array(counts, dtype=np.int32)

    def run(self, spec: OpSpec, tensors: Sequence[Any], call: Call, grouped: bool) -> Any:
        return perform(self, spec, tensors, call, grouped)


def _empty(shape: tuple[int, ...], like: Any) -> Any:
    # Without NumPy's semantics of shapes, a dimension of 0 means one that is not known yet.
    with mx.util.np_shape(True):
        made = mx.nd.empty(shape, ctx=mx.cpu(), dtype=like.dtype)
    return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made


ADAPTER = MXNetAdapter()
