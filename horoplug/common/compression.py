"""Smaller tensors on the way, in any framework: what :mod:`horoplug.torch.compression` and its like have in common.

A framework's module derives its ``CastCompressor`` and those for its data types, and names them in ``Compression``."""

from collections.abc import Callable, Iterable, Sequence
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

    A framework adds the underscored methods."""

    dtype: Any
    wire_dtype: int = 0
    """The code of ``dtype`` if the core may do the same to float32, as it copies. A class has that for itself alone:
    one that derives from it may do other things."""

    def __init_subclass__(cls) -> None:
        cls.wire_dtype = vars(cls).get("wire_dtype", 0)

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
    def _is_float32(tensor: Any) -> bool:
        """Whether that is the tensor's data type."""
        raise NotImplementedError

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        """The tensor in another data type; the same one if it has that already."""
        raise NotImplementedError


def wire_dtype(compression: Any) -> int:
    """The code of the type to which the core casts float32 by itself for this compression; 0: it does not."""
    known = isinstance(compression, type) and issubclass(compression, CastCompressor)
    return compression.wire_dtype if known else 0


def is_cast_by_core(compression: Any, tensor: Any) -> bool:
    """Whether the core casts a tensor in an allreduce whose Call has :func:`wire_dtype`; otherwise ``compression`` has
    to be called, and its result sent as it is."""
    return wire_dtype(compression) != 0 and compression._is_float32(tensor)


def pack(
    compression: Any, tensors: Sequence[Any], casts: bool
) -> tuple[list[Any], int, Callable[[Iterable[Any]], list[Any]]]:
    """``(tensors to send, Call.wire_dtype for them, the function that unpacks the results)``.

    ``casts``: whether the core does in this operation (OpSpec.casts)."""
    left = [casts and is_cast_by_core(compression, tensor) for tensor in tensors]
    packed = [
        (tensor, None) if as_it_is else compression.compress(tensor)
        for tensor, as_it_is in zip(tensors, left, strict=True)
    ]

    def unpack(results: Iterable[Any]) -> list[Any]:
        return [
            result if as_it_is else compression.decompress(result, kept)
            for result, as_it_is, (_, kept) in zip(results, left, packed, strict=True)
        ]

    return [tensor for tensor, _ in packed], wire_dtype(compression) if casts else 0, unpack
