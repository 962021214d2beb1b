"""Smaller tensors on the way: ``Compression.none``, ``.fp16``, ``.bf16``."""

from typing import Any

import torch


class Compressor:
    """The interface; derive from it for a compression of your own. Both methods are static."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """``(tensor to send, whatever decompress needs to undo it)``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor as it was before compress."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; others, and those that are as narrow, as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        narrower = tensor.is_floating_point() and tensor.element_size() > cls.dtype.itemsize
        return tensor.to(cls.dtype) if narrower else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(CastCompressor):
    """Sends float32 and float64 as float16."""

    dtype = torch.float16


class BF16Compressor(CastCompressor):
    """Sends float32 and float64 as bfloat16: float32's range, 8 bits of precision."""

    dtype = torch.bfloat16


class Compression:
    """What ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
