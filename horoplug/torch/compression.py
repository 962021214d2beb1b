"""Smaller tensors on the way: ``Compression.none``, ``.fp16``, ``.bf16``."""

import torch

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor
from horoplug.common.dtypes import CODES


class CastCompressor(compression.CastCompressor):
    """Sends floating-point tensors in a narrower type; others, and those that are as narrow, as they are."""

    @classmethod
    def _is_wider(cls, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_floating_point() and tensor.element_size() > cls.dtype.itemsize)

    @staticmethod
    def _is_float32(tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.float32

    @staticmethod
    def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class FP16Compressor(CastCompressor):
    """Sends float32 and float64 as float16."""

    dtype = torch.float16
    wire_dtype = CODES["float16"]


class BF16Compressor(CastCompressor):
    """Sends float32 and float64 as bfloat16: float32's range, 8 bits of precision."""

    dtype = torch.bfloat16
    wire_dtype = CODES["bfloat16"]


class Compression:
    """What ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
