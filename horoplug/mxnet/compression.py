"""Compression of MXNet's NDArrays for the transfer: ``Compression.none``, ``.fp16``, ``.bf16``."""

from typing import Any

import numpy as np

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor

_WIDER = (np.dtype(np.float32), np.dtype(np.float64))


class CastCompressor(compression.CastCompressor):
    """The :class:`horoplug.common.compression.CastCompressor` of MXNet's NDArrays."""

    @classmethod
    def _is_wider(cls, tensor: Any) -> bool:
        return np.dtype(tensor.dtype) in _WIDER

    @staticmethod
    def _is_float32(tensor: Any) -> bool:
        return bool(np.dtype(tensor.dtype) == np.float32)

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype, copy=False)


_DTYPES = {"float16": np.float16, "bfloat16": np.dtype([("bfloat16", np.uint16)])}
_EXAMPLE = """
    x = mx.nd.array([1.0 + hvd.rank(), 2.0])
    packed, dtype = hvd.Compression.fp16.compress(x)
    packed.dtype.__name__  # -> "float16"
    hvd.Compression.fp16.decompress(packed, dtype)  # -> [1.0, 2.0] on rank 0, [2.0, 2.0] on rank 1
"""
Compression = compression.cast_compressors(CastCompressor, _DTYPES, _EXAMPLE)
FP16Compressor = Compression.fp16
BF16Compressor = Compression.bf16
