"""Arrays on simulated GPUs whose only interface is DLPack, written from its specification."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.harness import simulated_gpu

ON_CUDA = 2
READ_ONLY, COPIED = 1, 2
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # by NumPy's kind; types of ml_dtypes by name
ML_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Unversioned(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]
    name, used_name = b"dltensor", b"used_dltensor"


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]
    name, used_name = b"dltensor_versioned", b"used_dltensor_versioned"


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]


def consume(capsule: object, kind: type[Any]) -> Any:
    """The struct in a capsule. The caller has to call its ``deleter``."""
    managed = kind.from_address(_get(capsule, kind.name))
    _rename(capsule, kind.used_name)
    return managed


def numbers(values: Any) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


class Producer:
    """An array of ``simulated_gpu`` that is exported by DLPack. Attributes may be changed before the export."""

    def __init__(self, array: simulated_gpu.Array, versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned
        self.shape, self.strides, self.offset = array.shape, None, 0
        code = ML_CODES.get(array.dtype.name)
        code = CODES[array.dtype.kind] if code is None else code
        self.dtype = code, 8 * array.dtype.itemsize, 1
        if array.dtype.kind == "b":
            self.dtype = CODES["b"], 8, 1
        self.major, self.flags = 1, 0
        self.device_type = ON_CUDA
        self.capsules: list[object] = []
        self.streams: list[object] = []  # requested by importers
        self.ended: list[int] = []  # addresses of the exported structs that were deleted
        self._kept: dict[int, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, self.array.device.ordinal

    def __dlpack__(self, *, stream: object, **how: object) -> object:
        if not self.versioned and how:
            raise TypeError("unexpected keyword argument")
        self.streams.append(stream)
        self.array.device.order(stream, self.array.stream)
        managed = Versioned() if self.versioned else Unversioned()
        if isinstance(managed, Versioned):
            managed.major, managed.flags = self.major, self.flags
        tensor = managed.tensor
        tensor.data, tensor.byte_offset = self.array.address, self.offset
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.code, tensor.bits, tensor.lanes = self.dtype
        tensor.ndim, tensor.shape = len(self.shape), numbers(self.shape)
        if self.strides is not None:
            tensor.strides = numbers(self.strides)
        managed.deleter = DELETER(self.ended.append)
        address = ctypes.addressof(managed)
        self._kept[address] = managed
        self.capsules.append(_new(address, managed.name, None))
        return self.capsules[-1]

    def all_ended(self) -> bool:
        """Whether every exported struct was deleted exactly once."""
        return sorted(self.ended) == sorted(self._kept)
