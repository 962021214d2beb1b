"""Smaller tensors on the way: ``Compression.none``, ``.fp16``, ``.bf16``."""

from typing import Any

import tensorflow as tf


class Compressor:
    """The interface; derive from it for a compression of your own. Both methods are static."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """``(tensor to send, whatever decompress needs to undo it)``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The received tensor as it was before compress."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: None) -> tf.Tensor:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type; others, and those that are as narrow, as they are."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        narrower = tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size
        return tf.cast(tensor, cls.dtype) if narrower else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, ctx)


class FP16Compressor(CastCompressor):
    """Sends float32 and float64 as float16."""

    dtype = tf.float16


class BF16Compressor(CastCompressor):
    """Sends float32 and float64 as bfloat16: float32's range, 8 bits of precision."""

    dtype = tf.bfloat16


class Compression:
    """What ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
