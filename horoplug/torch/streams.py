"""The GPU of a tensor, and the stream that the caller uses on it."""

import torch

# Creates no Python object for the stream. torch.compile uses this function as well.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def device_of(tensor: torch.Tensor) -> int:
    """The ordinal of the GPU that holds the tensor. Raises ValueError for a device that horoplug does not support."""
    if not tensor.is_cuda or torch.version.hip:
        kind = "a ROCm device" if tensor.is_cuda else str(tensor.device)
        raise ValueError(
            f"the tensor is on {kind}; horoplug supports tensors in the memory of the CPU and of NVIDIA GPUs: move it "
            "with .cpu() first"
        )
    return tensor.get_device()


def of(tensor: torch.Tensor) -> tuple[int, int]:
    """The GPU of a tensor and its current stream. Raises as :func:`device_of`."""
    device = device_of(tensor)
    return device, current(device)


def current(device: int) -> int:
    """The current stream of a GPU, as an integer (CUstream)."""
    if _raw_stream is not None:
        return int(_raw_stream(device))
    return int(torch.cuda.current_stream(device).cuda_stream)
