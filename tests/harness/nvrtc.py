"""A wrapper of NVRTC, CUDA's run-time compiler, for tests of the GPU kernels. It needs no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from tests.harness import ROOT

SOURCES = ROOT / "csrc" / "device" / "cuda" / "kernels"


class Nvrtc:
    """An NVRTC library. Failures raise ``RuntimeError`` with the compiler's log."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def _call(self, name: str, *arguments) -> None:
        result = getattr(self._library, f"nvrtc{name}")(*arguments)
        if result != 0:
            raise RuntimeError(f"nvrtc{name} failed with {result}")

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def archs(self) -> list[int]:
        """The supported compute capabilities: 75 is sm_75."""
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", archs)
        return sorted(archs)

    def compile(self, options: Sequence[str]) -> tuple[bytes, str]:
        """The cubin of the kernels, or PTX for a virtual architecture, and the compiler's log."""
        program = ctypes.c_void_p()
        # Headers by the names under which the kernels include them.
        headers = {
            f"device/cuda/kernels/{path.name}": path
            for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.def")))
        }
        headers["horoplug/dtypes.def"] = ROOT / "csrc" / "include" / "horoplug" / "dtypes.def"
        texts = (ctypes.c_char_p * len(headers))(*[path.read_bytes() for path in headers.values()])
        names = (ctypes.c_char_p * len(headers))(*[name.encode() for name in headers])
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            (SOURCES / "kernels.cu").read_bytes(),
            b"kernels.cu",
            len(headers),
            texts,
            names,
        )
        try:
            flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            failed = self._library.nvrtcCompileProgram(program, len(options), flags)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode()
            if failed:
                raise RuntimeError(log)
            virtual = any(option.startswith("--gpu-architecture=compute") for option in options)
            return self._read("PTX" if virtual else "CUBIN", program), log
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, text)
        return text.raw
