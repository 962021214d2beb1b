"""XLA's foreign function interface: its version, and its structs as csrc/bindings/jax/xla_ffi.h declares them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, program_text
from tests.harness.limits import scaled
from tests.harness.xla_calls import Xla

jaxlib = pytest.importorskip("jaxlib")
library = pytest.importorskip("horoplug.jax.library")

# XLA's struct and horoplug's, and the members of each.
STRUCTS = {
    ("Extension_Base", "Extension"): {"struct_size": "struct_size", "type": "type", "next": "next"},
    ("Api_Version", "ApiVersion"): {"major_version": "major", "minor_version": "minor"},
    ("Metadata", "Metadata"): {"api_version": "api_version", "traits": "traits"},
    ("Metadata_Extension", "MetadataExtension"): {"metadata": "metadata"},
    ("Error_Create_Args", "ErrorCreateArgs"): {"message": "message", "errc": "code"},
    ("Error_GetMessage_Args", "ErrorMessageArgs"): {"error": "error", "message": "message"},
    ("Error_Destroy_Args", "ErrorDestroyArgs"): {"error": "error"},
    ("Stream_Get_Args", "StreamArgs"): {"ctx": "context", "stream": "stream"},
    ("DeviceOrdinal_Get_Args", "OrdinalArgs"): {"ctx": "context", "device_ordinal": "ordinal"},
    ("Api", "Api"): {
        "api_version": "api_version",
        "XLA_FFI_Error_Create": "error_create",
        "XLA_FFI_Error_GetMessage": "error_message",
        "XLA_FFI_Error_Destroy": "error_destroy",
        "XLA_FFI_Stream_Get": "stream",
        "XLA_FFI_DeviceOrdinal_Get": "ordinal",
    },
    ("Buffer", "Buffer"): {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"},
    ("ByteSpan", "ByteSpan"): {"ptr": "data", "len": "size"},
    ("Scalar", "Scalar"): {"dtype": "dtype", "value": "value"},
    ("Array", "Array"): {"dtype": "dtype", "size": "size", "data": "data"},
    ("Args", "Buffers"): {"size": "size", "types": "types", "args": "buffers"},
    ("Rets", "Buffers"): {"size": "size", "types": "types", "rets": "buffers"},
    ("Attrs", "Attributes"): {
        "size": "size",
        "types": "types",
        "names": "names",
        "attrs": "values",
    },
    ("CallFrame", "CallFrame"): {
        "extension_start": "extensions",
        "api": "api",
        "ctx": "context",
        "stage": "stage",
        "args": "arguments",
        "rets": "results",
        "attrs": "attributes",
    },
}
ENUMERATORS = {
    "Extension_Metadata": "kExtensionMetadata",
    "Error_Code_UNKNOWN": "kUnknown",
    "Error_Code_INVALID_ARGUMENT": "kInvalidArgument",
    "Error_Code_FAILED_PRECONDITION": "kFailedPrecondition",
    "Error_Code_UNIMPLEMENTED": "kUnimplemented",
    "Error_Code_INTERNAL": "kInternal",
    "DataType_TOKEN": "kToken",
    "AttrType_ARRAY": "kArray",
    "AttrType_DICTIONARY": "kDictionary",
    "AttrType_SCALAR": "kScalar",
    "AttrType_STRING": "kString",
    "ExecutionStage_EXECUTE": "kExecute",
    "API_MAJOR": "kMajor",
}


def test_structs_match_the_headers_of_jaxlib(tmp_path):
    """The structs in xla_ffi.h have the layout of jaxlib's header."""
    headers = Path(jaxlib.__file__).parent / "include"
    if not (headers / "xla/ffi/api/c_api.h").exists():
        pytest.skip("this jaxlib has no headers")
    compiler = shutil.which("g++") or shutil.which("clang++-16")
    assert compiler
    checks = [
        f"static_assert(offsetof(XLA_FFI_{theirs}, {field}) == offsetof(xla::{ours}, {own}));\n"
        f"static_assert(sizeof(XLA_FFI_{theirs}::{field}) == sizeof(xla::{ours}::{own}));"
        for (theirs, ours), fields in STRUCTS.items()
        for field, own in fields.items()
    ]
    checks += [
        f"static_assert(int(XLA_FFI_{theirs}) == int(xla::{ours}));"
        for theirs, ours in ENUMERATORS.items()
    ]
    source = tmp_path / "check.cc"
    source.write_text(
        '#include "xla/ffi/api/c_api.h"\n#include "xla_ffi.h"\nusing namespace horoplug::jax;\n'
        + "\n".join(checks)
    )
    include = [f"-I{headers}", f"-I{ROOT / 'csrc/bindings/jax'}"]
    subprocess.run([compiler, "-std=c++20", "-fsyntax-only", *include, source], check=True)


@pytest.mark.parametrize(("version", "declared"), [((0, 3), (0, 3)), ((1, 7), (0, 1))])
def test_handlers_declare_the_known_major_version(version, declared):
    xla = Xla(stream=0, device=0, version=version)
    for handler in library.LIBRARY.horoplug_jax_run, library.LIBRARY.horoplug_jax_copy_results:
        assert xla.traits(handler) == (*declared, 0)


# A process of its own: JAX cannot be used any more if handlers are refused before its first operation.
REGISTER = program_text("tests/jax/programs/xla_interface_register.py")


@pytest.mark.parametrize(
    ("time", "error"), [("after", "ImportError the XLA of JAX"), ("before", "RuntimeError")]
)
def test_xla_refuses_handlers_of_another_major_version_with_one_line(time, error):
    done = subprocess.run(
        [sys.executable, "-c", REGISTER, time],
        capture_output=True,
        text=True,
        timeout=scaled(100),
        cwd=ROOT,
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith(error)
    assert "horoplug_test" in line
    assert "version (1.0)" in line
