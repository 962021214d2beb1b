"""Compression of tensors for the transfer, the same in every framework.

A framework's ``compression`` module derives a :class:`CastCompressor` that knows its tensors, and makes the values of
``compression=`` from :data:`CASTS` with :func:`cast_compressors`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from horoplug.common.dtypes import CODES


class AnyCompressor(Protocol):
    """What ``compression=`` takes: a class or an object with these methods, which need not derive from
    :class:`Compressor`."""

    def compress(self, tensor: Any, /) -> tuple[Any, Any]:
        """See :meth:`Compressor.compress`."""

    def decompress(self, tensor: Any, ctx: Any, /) -> Any:
        """See :meth:`Compressor.decompress`."""


class Compressor:
    """The interface of a compression; derive from it for one of your own. Both methods are static."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return ``(tensor to send, context that decompress needs)``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undo compress: return a received tensor with the dtype that the tensor had before compress."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower dtype, ``dtype``. Tensors of other types, and floating-point tensors
    that are not wider than ``dtype``, are sent unchanged.

    A framework implements the methods that begin with an underscore."""

    dtype: Any
    wire_dtype: int = 0
    """The core's code of ``dtype`` if the core may cast float32 itself while it packs, 0 otherwise. A derived class
    does not inherit the value, because it may override ``compress``."""

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
        """Whether the tensor is floating-point with larger elements than ``dtype``."""
        raise NotImplementedError

    @staticmethod
    def _is_float32(tensor: Any) -> bool:
        """Whether the tensor's dtype is float32."""
        raise NotImplementedError

    @staticmethod
    def _cast(tensor: Any, dtype: Any) -> Any:
        """The tensor in another dtype; the same object if it has that dtype already."""
        raise NotImplementedError


class Cast(NamedTuple):
    """A compression that only casts."""

    option: str  # attribute of the framework's ``Compression``
    class_name: str
    dtype: str
    summary: str


CASTS: Final = (
    Cast("fp16", "FP16Compressor", "float16", "Sends float32 and float64 as float16."),
    Cast(
        "bf16",
        "BF16Compressor",
        "bfloat16",
        "Sends float32 and float64 as bfloat16, which has the range of float32 and 8 bits of precision.",
    ),
)
"""The compressions that every framework has besides ``none``."""


class CompressionOptions:
    """The values that ``compression=`` takes."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[CastCompressor]]
    bf16: ClassVar[type[CastCompressor]]


_DOCUMENTED: Final = """What ``compression=`` takes: the dtype in which float32 and float64 are sent.

none: the dtype of the tensors.
fp16: float16.
bf16: bfloat16, which has the range of float32 and 8 bits of precision.

Example, on two ranks:
"""


def cast_compressors(
    base: type[CastCompressor], dtypes: Mapping[str, Any], example: str
) -> type[CompressionOptions]:
    """The class ``Compression`` of a framework, with a compressor for each row of :data:`CASTS`.

    ``base``: the framework's CastCompressor; ``dtypes``: its dtypes by name; ``example``: lines of code, for the
    documentation. The classes appear in the module of
    ``base``, which has to bind them to their names (``FP16Compressor = Compression.fp16``) so that they can be pickled
    and imported."""
    values: dict[str, Any] = {"__module__": base.__module__, "__doc__": _DOCUMENTED + example}
    for cast in CASTS:
        body = {
            "__module__": base.__module__,
            "__doc__": cast.summary,
            "dtype": dtypes[cast.dtype],
            "wire_dtype": CODES[cast.dtype],
        }
        values[cast.option] = type(cast.class_name, (base,), body)
    return type("Compression", (CompressionOptions,), values)


def wire_dtype(compression: Any) -> int:
    """The code of the dtype to which the core casts float32 for this compression; 0: the core does not cast."""
    check_compressor(compression)
    known = isinstance(compression, type) and issubclass(compression, CastCompressor)
    return compression.wire_dtype if known else 0


def is_cast_by_core(compression: Any, tensor: Any) -> bool:
    """Whether the core casts the tensor in an allreduce with :func:`wire_dtype`. Otherwise the caller has to call
    ``compression.compress`` and send the result."""
    return wire_dtype(compression) != 0 and compression._is_float32(tensor)


def check_compressor(compression: Any) -> None:
    """Raises TypeError for a value of ``compression=`` that does not compress."""
    if not hasattr(compression, "compress"):
        raise TypeError(
            "compression= takes Compression.none, .fp16, .bf16, or a class with the methods compress and decompress, "
            f"got {compression!r}"
        )


class Packed(NamedTuple):
    """Tensors in the form in which they are sent."""

    tensors: list[Any]
    wire_dtype: int  # for Call.wire_dtype
    unpack: Callable[[Iterable[Any]], list[Any]]  # restores the dtypes of the results


def pack(compression: Any, tensors: Sequence[Any], casts: bool) -> Packed:
    """Compress tensors for an operation. ``casts``: OpSpec.casts of the operation."""
    check_compressor(compression)
    left_to_core = [casts and is_cast_by_core(compression, tensor) for tensor in tensors]
    packed = [
        (tensor, None) if unchanged else compression.compress(tensor)
        for tensor, unchanged in zip(tensors, left_to_core, strict=True)
    ]

    def unpack(results: Iterable[Any]) -> list[Any]:
        return [
            result if unchanged else compression.decompress(result, context)
            for result, unchanged, (_, context) in zip(results, left_to_core, packed, strict=True)
        ]

    wire = wire_dtype(compression) if casts else 0
    return Packed([tensor for tensor, _ in packed], wire, unpack)
