"""Smaller tensors on the way, in any framework: what :mod:`horoplug.torch.compression` and its like have in common.

A framework's module derives its ``CastCompressor`` and those for its data types, and names them in ``Compression``."""

from typing import Any


class Compressor:
    """The interface; derive from it for a compression of your own. Both methods are static."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """``(tensor to send, whatever decompress needs to undo it)``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor as it was before compress."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower type, ``dtype``; others, and those that are as narrow, as they are.

    A framework adds the two underscored methods."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return cls._cast(tensor, cls.dtype) if cls._is_wider(tensor) else tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return cls._cast(tensor, ctx)

    @classmethod
    def _is_wider(cls, tensor: Any) -> bool:
        """Whether elements are floating-point numbers of more bytes than those of ``dtype``."""
        raise NotImplementedError

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        """The tensor in another data type; the same one if it has that already."""
        raise NotImplementedError
