"""The adapter of PyTorch tensors for :mod:`horoplug.common.ops`."""

from collections.abc import Sequence
from typing import Any

import torch

from horoplug._native import DeviceMemory, Memory
from horoplug.common import dtypes
from horoplug.common.arguments import not_a_tensor
from horoplug.common.ops import CPU, Direct, Documented, perform
from horoplug.common.opspec import Call, OpSpec
from horoplug.torch import streams
from horoplug.torch.autograd import Collective
from horoplug.torch.compression import Compression
from horoplug.torch.plain import is_plain, plain

# By dtype. Older versions of PyTorch lack some dtypes: uint16, uint32 and uint64 exist from 2.3 on.
CODES = {getattr(torch, name): code for name, code in dtypes.CODES.items() if hasattr(torch, name)}


class TorchAdapter:
    """See :class:`horoplug.common.ops.Adapter`."""

    tensor_type = torch.Tensor
    documented = Documented(
        tensor="a dense torch.Tensor in host memory or on a GPU",
        dtypes="bool, (u)int8 to (u)int64, float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, complex64, "
        "complex128",
        make="torch.tensor",
    )
    compression = Compression.none
    direct = (
        Direct(
            torch.Tensor,
            torch.Tensor.__dlpack_c_exchange_api__,
            torch.empty_like,
            torch.Tensor.new_empty,
        )
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # PyTorch 2.10 and newer
        else None
    )
    for_sparse = "use .to_dense(), or sparse_allreduce_async"
    for_shared_elements = "use the variant that returns a new tensor"
    """What to do with tensors that are refused, for texts of errors."""

    def describe(
        self, tensor: torch.Tensor, in_place: bool
    ) -> tuple[torch.Tensor, int, int, Sequence[int], int]:
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor("a torch.Tensor", tensor, "torch.as_tensor")
        code = CODES.get(tensor.dtype)
        if code is None:
            raise dtypes.unsupported(tensor.dtype, CODES)
        device = CPU if tensor.is_cpu else streams.device_of(tensor)
        if tensor.is_nested:
            raise ValueError("the tensor is nested; pass torch.nested.to_padded_tensor(x, 0.0)")
        if tensor.layout is not torch.strided:
            raise ValueError(f"the tensor's layout is {tensor.layout}; {self.for_sparse}")
        if is_plain(tensor):
            return tensor, code, tensor.data_ptr(), tensor.shape, device
        if in_place and _overlaps(tensor):
            raise ValueError(
                "elements of the tensor share memory, as after expand(), so it cannot be overwritten; "
                f"{self.for_shared_elements}"
            )
        dense = plain(tensor)
        return dense, code, dense.data_ptr(), dense.shape, device

    def stream(self, device: int, tensors: Sequence[torch.Tensor]) -> int:
        return streams.current(device)

    def empty_like(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return made, made.data_ptr()

    def copy_back(self, result: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(result)

    def from_memory(
        self, memory: Memory | DeviceMemory | None, like: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        if memory is None or memory.nbytes == 0:  # frombuffer rejects empty memory
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        if isinstance(
            memory, DeviceMemory
        ):  # as bytes, since its interface does not have every dtype
            return torch.as_tensor(memory, device=like.device).view(like.dtype).view(shape)
        return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    def to_counts(self, splits: Any) -> list[int]:
        try:
            counts = torch.as_tensor(splits)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError("splits= takes one integer for each rank") from None
        if counts.ndim != 1 or counts.is_floating_point() or counts.dtype == torch.bool:
            raise ValueError("splits= takes one integer for each rank")
        return counts.tolist()

    def from_counts(self, counts: Sequence[int]) -> torch.Tensor:
        return torch.tensor(counts, dtype=torch.int32)

    def run(self, spec: OpSpec, tensors: Sequence[torch.Tensor], call: Call, grouped: bool) -> Any:
        if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors):
            return Collective.run(self, spec, tensors, call, grouped)
        return perform(self, spec, tensors, call, grouped)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may have the same address. The result may be True without need if strides interleave."""
    extent = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, count in sorted((stride, count) for stride, count in dimensions if count != 1):
        if stride < extent:
            return tensor.numel() > 0
        extent += stride * (count - 1)
    return False


ADAPTER = TorchAdapter()
