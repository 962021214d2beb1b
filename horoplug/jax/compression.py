"""Compression of JAX arrays for the transfer: ``Compression.none``, ``.fp16``, ``.bf16``."""

from typing import Any

import jax
import jax.numpy as jnp

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor


class CastCompressor(compression.CastCompressor):
    """The :class:`horoplug.common.compression.CastCompressor` of JAX arrays."""

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


_EXAMPLE = """
    x = jnp.array([1.0 + hvd.rank(), 2.0])
    hvd.allreduce(x, compression=hvd.Compression.fp16)  # -> [1.5, 2.0]
"""
Compression = compression.cast_compressors(CastCompressor, vars(jnp), _EXAMPLE)
FP16Compressor = Compression.fp16
BF16Compressor = Compression.bf16
