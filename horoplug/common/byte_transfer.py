"""Operations on plain bytes, without a framework: for pickled objects and for the package itself."""

import ctypes
from collections.abc import Sequence
from typing import Any

from horoplug._native import DeviceMemory, Memory
from horoplug.common import dtypes
from horoplug.common.ops import CPU, perform, submit
from horoplug.common.opspec import BY_NAME, Call, OpSpec


class _BytesAdapter:
    """The :class:`horoplug.common.ops.Adapter` of writable memoryviews of format B with one dimension."""

    tensor_type = memoryview
    compression = None

    def describe(self, tensor: memoryview, in_place: bool) -> tuple[memoryview, int, int, Any, int]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(tensor)) if tensor.nbytes else 0
        return tensor, dtypes.CODES["uint8"], address, tensor.shape, CPU

    def stream(self, device: int, tensors: Sequence[memoryview]) -> int:
        raise NotImplementedError  # host memory only

    def empty_like(self, tensor: memoryview) -> tuple[memoryview, int]:
        made = memoryview(bytearray(tensor.nbytes))
        return made, self.describe(made, False)[2]

    def copy_back(self, result: memoryview, tensor: memoryview) -> None:
        tensor[:] = result

    def from_memory(
        self, memory: Memory | DeviceMemory | None, like: memoryview, shape: Sequence[int]
    ) -> memoryview:
        assert not isinstance(memory, DeviceMemory)
        return memoryview(b"") if memory is None else memoryview(memory)

    def to_counts(self, splits: Any) -> list[int]:
        return list(splits)

    def from_counts(self, counts: Sequence[int]) -> Any:
        return list(counts)

    def run(self, spec: OpSpec, tensors: Sequence[memoryview], call: Call, grouped: bool) -> Any:
        return perform(self, spec, tensors, call, grouped)


_ADAPTER = _BytesAdapter()


def broadcast_bytes(data: bytearray, call: Call) -> None:
    """Overwrite ``data`` with the data of rank ``call.root``. The size is the same on all ranks."""
    perform(_ADAPTER, BY_NAME["broadcast"], (memoryview(data),), call, in_place=True)


def allgather_bytes(data: bytearray, call: Call) -> list[memoryview]:
    """The data of all ranks of the process set, in rank order; empty for a rank that has called ``join``."""
    operation = submit(_ADAPTER, BY_NAME["allgather"], (memoryview(data),), call, blocking=True)
    joined = operation.wait()
    parts, start = [], 0
    for length in operation.row_counts[0]:
        parts.append(joined[start : start + length])
        start += length
    return parts


def send_bytes(data: bytearray, call: Call) -> None:
    """Send ``data`` to rank ``call.root``, which receives it with the same tag."""
    perform(_ADAPTER, BY_NAME["send"], (memoryview(data),), call)


def recv_bytes(data: bytearray, call: Call) -> None:
    """Overwrite ``data`` with what rank ``call.root`` has sent. The size is that of the sent data."""
    perform(_ADAPTER, BY_NAME["recv"], (memoryview(data),), call, in_place=True)
