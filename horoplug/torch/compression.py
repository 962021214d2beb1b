"""Compression of PyTorch tensors for the transfer: ``Compression.none``, ``.fp16``, ``.bf16``."""

import torch

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor


class CastCompressor(compression.CastCompressor):
    """The :class:`horoplug.common.compression.CastCompressor` of PyTorch tensors."""

    @classmethod
    def _is_wider(cls, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_floating_point() and tensor.element_size() > cls.dtype.itemsize)

    @staticmethod
    def _is_float32(tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.float32

    @staticmethod
    def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


_EXAMPLE = """
    x = torch.tensor([1.0 + hvd.rank(), 2.0])
    hvd.allreduce(x, compression=hvd.Compression.fp16)  # -> [1.5, 2.0]
"""
Compression = compression.cast_compressors(CastCompressor, vars(torch), _EXAMPLE)
FP16Compressor = Compression.fp16
BF16Compressor = Compression.bf16
