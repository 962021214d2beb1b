"""Which card a tensor is on, and which of its streams the caller uses."""

import torch

# Without an object for the stream; it is what torch.compile uses.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def device_of(tensor: torch.Tensor) -> int:
    """The number of the card that has the tensor. ValueError if it is in no memory that horoplug can reach."""
    if not tensor.is_cuda or torch.version.hip:
        kind = "a ROCm device" if tensor.is_cuda else str(tensor.device)
        raise ValueError(
            f"the tensor is on {kind}; horoplug takes tensors in the memory of the CPU and of NVIDIA GPUs: move it "
            "with .cpu() first."
        )
    return tensor.get_device()


def of(tensor: torch.Tensor) -> tuple[int, int]:
    """The card that has a tensor, and its current stream. Raises as :func:`device_of`."""
    device = device_of(tensor)
    return device, current(device)


def current(device: int) -> int:
    """The current stream of a card, as an integer (CUstream)."""
    if _raw_stream is not None:
        return int(_raw_stream(device))
    return int(torch.cuda.current_stream(device).cuda_stream)
