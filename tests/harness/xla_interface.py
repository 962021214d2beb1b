"""The structs of XLA's foreign function interface by which a handler declares its version."""

import ctypes


class Extension(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    ]


class Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("version", Version),
        ("traits", ctypes.c_uint32),
        ("reserved", ctypes.c_int64 * 2),
    ]


class Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("version", Version),
    ]


class CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.POINTER(Extension)),
        ("api", ctypes.POINTER(Api)),
        ("rest", ctypes.c_byte * 256),
    ]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(CallFrame))
def handler_of_another_version(frame):
    metadata = Metadata.from_address(frame.contents.extensions.contents.metadata)
    metadata.version.major, metadata.version.minor = 1, 0
