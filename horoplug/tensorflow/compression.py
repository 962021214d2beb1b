"""Smaller tensors on the way: ``Compression.none``, ``.fp16``, ``.bf16``."""

import tensorflow as tf

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor
from horoplug.common.dtypes import CODES


class CastCompressor(compression.CastCompressor):
    """Sends floating-point tensors in a narrower type; others, and those that are as narrow, as they are."""

    @classmethod
    def _is_wider(cls, tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size)

    @staticmethod
    def _is_float32(tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype == tf.float32)

    @staticmethod
    def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(CastCompressor):
    """Sends float32 and float64 as float16."""

    dtype = tf.float16
    wire_dtype = CODES["float16"]


class BF16Compressor(CastCompressor):
    """Sends float32 and float64 as bfloat16: float32's range, 8 bits of precision."""

    dtype = tf.bfloat16
    wire_dtype = CODES["bfloat16"]


class Compression:
    """What ``compression=`` takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
