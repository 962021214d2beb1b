"""What a plain tensor is: one whose memory holds its elements as they are. Only such a tensor may be given to the core
by its address."""

import torch


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of the tensor holds its elements in row-major order: it is neither sparse nor strided
    otherwise, nor a lazy conjugate or negative, whose memory holds other values."""
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a plain copy of a strided tensor that is not plain. The copy is no part of autograd's graph."""
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, as a vector that shares its memory."""
    # Dimensions of one element may have any stride, which `view` would refuse.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
