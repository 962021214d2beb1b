"""A replacement for XLA that calls the handlers: the structs of XLA's C API in ctypes, and its functions in Python.

    xla = Xla(stream=device.stream, device=0)
    failure = xla.call(library.horoplug_jax_run, [array], [result], operation=0, name="allreduce.x", ...)

``failure`` is None or the message. The structs are those of ``xla/ffi/api/c_api.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

_P, _SIZE, _I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_FUNCTION = ctypes.CFUNCTYPE(_P, _P)
DTYPES = {"bool": 1, "int8": 2, "int32": 4, "int64": 5, "float16": 10, "float32": 11}
_TOKEN, _S64, _F64 = 17, 5, 12
_ARRAY, _SCALAR, _STRING = 1, 3, 4
EXECUTE = 3


def _struct(name: str, *fields: tuple[str, Any], bare: bool = False) -> type[ctypes.Structure]:
    head = [] if bare else [("struct_size", _SIZE), ("extensions", _P)]
    return type(name, (ctypes.Structure,), {"_fields_": [*head, *fields]})


_Version = _struct("Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
_NAMES = "error_create error_message error_destroy register stream"
_Api = _struct(
    "Api",
    ("version", _Version),
    ("internal", _P),
    *((name, _FUNCTION) for name in _NAMES.split()),
    ("others", _P * 12),
    ("ordinal", _FUNCTION),
)
_Create = _struct("Create", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
_Message = _struct("Message", ("error", _P), ("message", ctypes.c_char_p))
_Destroy = _struct("Destroy", ("error", _P))
_Stream = _struct("Stream", ("context", _P), ("stream", _P))
_Ordinal = _struct("Ordinal", ("context", _P), ("ordinal", ctypes.c_int32))
_Buffer = _struct("Buffer", ("dtype", ctypes.c_int), ("data", _P), ("rank", _I64), ("dims", _P))
_Buffers = _struct("Buffers", ("size", _I64), ("types", _P), ("buffers", _P))
_Attributes = _struct("Attributes", ("size", _I64), ("types", _P), ("names", _P), ("values", _P))
_Span = _struct("Span", ("data", ctypes.c_char_p), ("size", _SIZE), bare=True)
_Scalar = _struct("Scalar", ("dtype", ctypes.c_int), ("value", _P), bare=True)
_Array = _struct("Array", ("dtype", ctypes.c_int), ("size", _SIZE), ("data", _P), bare=True)
_Metadata = _struct(
    "Metadata", ("size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32), bare=True
)
_Extension = _struct(
    "Extension", ("size", _SIZE), ("type", ctypes.c_int), ("next", _P), ("metadata", _P), bare=True
)
_Frame = _struct(
    "Frame",
    ("api", _P),
    ("context", _P),
    ("stage", ctypes.c_int),
    ("arguments", _Buffers),
    ("results", _Buffers),
    ("attributes", _Attributes),
)

OPERATION: dict[str, Any] = {
    "operation": 0,
    "name": "",
    "reduce_op": 1,
    "root": 0,
    "prescale": 1.0,
    "postscale": 1.0,
    "wire_dtype": 0,
    "process_set": 0,
    "splits": [],
    "size": 0,
    "rank": 0,
    "equal_rows": 1,
    "on_gpu": 1,
    "eager_call": 0,
}


class Xla:
    """``old``: a version without the function that returns the device. ``version``: major and minor version of the API.
    ``failing``: names of functions that fail."""

    def __init__(
        self, stream: int, device: int, old: bool = False, version: tuple[int, int] = (0, 3)
    ) -> None:
        self.stream, self.device = stream, device
        self.failing: set[str] = set()
        self.errors: dict[int, tuple[int, bytes]] = {}  # by handle
        self._handles = itertools.count(1)
        self._functions = [
            _FUNCTION(function)
            for function in (self._create, self._message, self._destroy, self._nothing)
        ]
        self._functions += [_FUNCTION(self._get_stream), _FUNCTION(self._get_ordinal)]
        *first, ordinal = self._functions
        self.api = _Api(ctypes.sizeof(_Api), None, _Version(0, None, *version), None, *first)
        self.api.ordinal = ordinal
        if old:
            self.api.struct_size = _Api.ordinal.offset

    # ---- functions of XLA's API ----

    def _error(self, message: bytes, code: int = 13) -> int:
        handle = next(self._handles)
        self.errors[handle] = code, message
        return handle

    def _nothing(self, _: int) -> None:
        raise AssertionError("handlers do not call this function")

    def _create(self, address: int) -> int:
        arguments = _Create.from_address(address)
        return self._error(arguments.message, arguments.code)

    def _message(self, address: int) -> None:
        arguments = _Message.from_address(address)
        arguments.message = self.errors[arguments.error][1]

    def _destroy(self, address: int) -> None:
        del self.errors[_Destroy.from_address(address).error]

    def _get_stream(self, address: int) -> int | None:
        _Stream.from_address(address).stream = self.stream
        return self._error(b"no stream today") if "stream" in self.failing else None

    def _get_ordinal(self, address: int) -> int | None:
        _Ordinal.from_address(address).ordinal = self.device
        return self._error(b"no device today") if "ordinal" in self.failing else None

    # ---- calls of handlers ----

    def call(
        self,
        handler: Any,
        arguments: Sequence[Any],
        results: Sequence[Any],
        stage: int = EXECUTE,
        **attributes: Any,
    ) -> str | None:
        """Call a handler with a token and arrays that have ``address``, ``shape`` and ``dtype``. Checks that all errors
        except the returned one were destroyed."""
        kept: list[Any] = []
        frame = _Frame(
            ctypes.sizeof(_Frame),
            None,
            ctypes.addressof(self.api),
            None,
            stage,
            _buffers(arguments, kept),
            _buffers(results, kept),
            _attributes(attributes, kept),
        )
        handle = self._run(handler, frame)
        if handle is None:
            assert not self.errors
            return None
        _, message = self.errors.pop(handle)
        assert not self.errors
        return message.decode()

    def traits(self, handler: Any) -> tuple[int, int, int]:
        """API version and traits, which a handler reports when it is registered."""
        metadata = _Metadata(ctypes.sizeof(_Metadata), _Version(), 99)
        extension = _Extension(ctypes.sizeof(_Extension), 1, None, ctypes.addressof(metadata))
        frame = _Frame(
            ctypes.sizeof(_Frame), ctypes.addressof(extension), ctypes.addressof(self.api)
        )
        assert self._run(handler, frame) is None
        return metadata.version.major, metadata.version.minor, metadata.traits

    def _run(self, handler: Any, frame: Any) -> int | None:
        function = ctypes.cast(handler, _FUNCTION)
        result: int | None = function(ctypes.addressof(frame))
        return result

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Make a function fail within the block: "stream" or "ordinal"."""
        self.failing.add(name)
        try:
            yield
        finally:
            self.failing.discard(name)


def handler_of_version(major: int, minor: int) -> Any:
    """A handler that declares this version of XLA's API, as a C function; it does nothing else."""

    def declare(address: int) -> None:
        extension = _Extension.from_address(_Frame.from_address(address).extensions)
        version = _Metadata.from_address(extension.metadata).version
        version.major, version.minor = major, minor

    return _FUNCTION(declare)


def _keep(value: Any, kept: list[Any]) -> int:
    kept.append(value)
    return ctypes.addressof(value)


def _buffers(arrays: Sequence[Any], kept: list[Any]) -> Any:
    made = [_Buffer(ctypes.sizeof(_Buffer), None, _TOKEN, None, 0, None)]
    for array in arrays:
        dims = _keep((_I64 * len(array.shape))(*array.shape), kept)
        dtype = DTYPES[array.dtype.name]
        made.append(
            _Buffer(ctypes.sizeof(_Buffer), None, dtype, array.address, len(array.shape), dims)
        )
    types = _keep((ctypes.c_int * len(made))(*[1] * len(made)), kept)
    pointers = _keep((_P * len(made))(*(_keep(buffer, kept) for buffer in made)), kept)
    return _Buffers(ctypes.sizeof(_Buffers), None, len(made), types, pointers)


def _attribute(value: Any, kept: list[Any]) -> tuple[int, int]:
    """The type and the address of an attribute."""
    if isinstance(value, str):
        return _STRING, _keep(_Span(value.encode(), len(value.encode())), kept)
    if isinstance(value, list):
        numbers = _keep((_I64 * len(value))(*value), kept)
        return _ARRAY, _keep(_Array(_S64, len(value), numbers), kept)
    is_float = isinstance(value, float)
    number = ctypes.c_double(value) if is_float else _I64(value)
    return _SCALAR, _keep(_Scalar(_F64 if is_float else _S64, _keep(number, kept)), kept)


def _attributes(attributes: dict[str, Any], kept: list[Any]) -> Any:
    names = sorted(attributes)
    found = [_attribute(attributes[name], kept) for name in names]
    spans = [_keep(_Span(name.encode(), len(name)), kept) for name in names]
    return _Attributes(
        ctypes.sizeof(_Attributes),
        None,
        len(names),
        _keep((ctypes.c_int * len(names))(*(kind for kind, _ in found)), kept),
        _keep((_P * len(names))(*spans), kept),
        _keep((_P * len(names))(*(address for _, address in found)), kept),
    )
