"""Compression of TensorFlow tensors for the transfer: ``Compression.none``, ``.fp16``, ``.bf16``."""

import tensorflow as tf

from horoplug.common import compression
from horoplug.common.compression import Compressor as Compressor
from horoplug.common.compression import NoneCompressor as NoneCompressor


class CastCompressor(compression.CastCompressor):
    """The :class:`horoplug.common.compression.CastCompressor` of TensorFlow tensors."""

    @classmethod
    def _is_wider(cls, tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype.is_floating and tensor.dtype.size > cls.dtype.size)

    @staticmethod
    def _is_float32(tensor: tf.Tensor) -> bool:
        return bool(tensor.dtype == tf.float32)

    @staticmethod
    def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


_EXAMPLE = """
    x = tf.constant([1.0 + hvd.rank(), 2.0])
    hvd.allreduce(x, compression=hvd.Compression.fp16)  # -> [1.5, 2.0]
"""
Compression = compression.cast_compressors(CastCompressor, vars(tf), _EXAMPLE)
FP16Compressor = Compression.fp16
BF16Compressor = Compression.bf16
