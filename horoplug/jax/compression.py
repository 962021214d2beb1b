"""Smaller arrays on the way: ``Compression.none``, ``.fp16``, ``.bf16``."""

from typing import Any

import jax
import jax.numpy as jnp


class Compressor:
    """The interface; derive from it for a compression of your own. Both methods are static, and are traced when they
    are called inside of ``jax.jit``."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        """``(array to send, whatever decompress needs to undo it)``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        """The received array as it was before compress."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends arrays as they are."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: jax.Array, ctx: None) -> jax.Array:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point arrays in a narrower dtype; others, and those that are as narrow, as they are."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: jax.Array) -> tuple[jax.Array, Any]:
        is_wider = (
            jnp.issubdtype(tensor.dtype, jnp.floating)
            and tensor.dtype.itemsize > jnp.dtype(cls.dtype).itemsize
        )
        return tensor.astype(cls.dtype) if is_wider else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        return tensor.astype(ctx)


class FP16Compressor(CastCompressor):
    """Sends float32 and float64 as float16."""

    dtype = jnp.float16


class BF16Compressor(CastCompressor):
    """Sends float32 and float64 as bfloat16: float32's range, 8 bits of precision."""

    dtype = jnp.bfloat16


class Compression:
    """What ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
