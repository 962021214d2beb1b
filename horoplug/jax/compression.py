"""Smaller arrays on the way: ``Compression.none``, ``.fp16``, ``.bf16``."""

from typing import Any

import jax
import jax.numpy as jnp

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor
from horoplug.common.dtypes import CODES


class CastCompressor(compression.CastCompressor):
    """Sends floating-point arrays in a narrower dtype; others, and those that are as narrow, as they are."""

    @classmethod
    def _is_wider(cls, tensor: jax.Array) -> bool:
        is_floating = jnp.issubdtype(tensor.dtype, jnp.floating)
        return bool(is_floating and tensor.dtype.itemsize > jnp.dtype(cls.dtype).itemsize)

    @staticmethod
    def _is_float32(tensor: jax.Array) -> bool:
        return bool(tensor.dtype == jnp.float32)

    @staticmethod
    def _cast(tensor: jax.Array, dtype: Any) -> jax.Array:
        return tensor.astype(dtype)


class FP16Compressor(CastCompressor):
    """Sends float32 and float64 as float16."""

    dtype = jnp.float16
    wire_dtype = CODES["float16"]


class BF16Compressor(CastCompressor):
    """Sends float32 and float64 as bfloat16: float32's range, 8 bits of precision."""

    dtype = jnp.bfloat16
    wire_dtype = CODES["bfloat16"]


class Compression:
    """What ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
