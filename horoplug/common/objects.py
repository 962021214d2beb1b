"""Any Python object from one rank to all, or from all to all, as pickled bytes.

They come over connections that were authenticated with the job's secret, so that unpickling them trusts nobody new."""

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

from horoplug._native import DeviceMemory, Memory
from horoplug.common import dtypes
from horoplug.common.context import context
from horoplug.common.ops import CPU, perform, submit
from horoplug.common.opspec import BY_NAME, Call, OpSpec
from horoplug.common.process_sets import ProcessSet, global_process_set, set_number

try:  # functions and classes of the main script, too
    from cloudpickle import dumps
except ImportError:
    from pickle import dumps


class _Bytes:
    """The adapter (:class:`horoplug.common.ops.Adapter`) of plain bytes: writable memoryviews of format B."""

    tensor_type = memoryview
    compression = None

    def describe(self, tensor: memoryview, in_place: bool) -> tuple[memoryview, int, int, Any, int]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(tensor)) if tensor.nbytes else 0
        return tensor, dtypes.CODES["uint8"], address, tensor.shape, CPU

    def stream(self, device: int, tensors: Sequence[memoryview]) -> int:
        raise NotImplementedError  # they are in the host's memory

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


_BYTES = _Bytes()


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on every rank; what other ranks pass is ignored. It must be picklable."""
    is_root = context.mesh().rank == root_rank
    data = bytearray(dumps(obj) if is_root else b"")
    length = bytearray(len(data).to_bytes(8, "little"))
    for part, suffix in (length, "sz"), (data, "t"):
        if suffix == "t" and not is_root:
            data = part = bytearray(int.from_bytes(length, "little"))
        call = Call(
            name and f"{name}.{suffix}", root=root_rank, process_set=set_number(process_set)
        )
        perform(_BYTES, BY_NAME["broadcast"], (memoryview(part),), call, in_place=True)
    return obj if is_root else pickle.loads(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the set, in the order of the ranks. They must be picklable. A rank that has joined
    has none."""
    view = memoryview(bytearray(dumps(obj)))
    call = Call(name, process_set=set_number(process_set))
    operation = submit(_BYTES, BY_NAME["allgather"], (view,), call, blocking=True)
    joined = operation.wait()
    objects, start = [], 0
    for length in filter(None, operation.row_counts[0]):
        objects.append(pickle.loads(joined[start : start + length]))
        start += length
    return objects
