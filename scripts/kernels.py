#!/usr/bin/env python3
"""Compiles the GPU kernels with nvcc into horoplug/kernels.fatbin, for machines that have no NVRTC.

The options are those with which the core calls NVRTC (csrc/device/cuda/jit/compile.cc), so that the results have the
same bits. By the file's header (csrc/device/cuda/jit/kernel_file.h) the core checks that the file is complete and was
made from the same source."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "device" / "cuda" / "kernels"
FILE = ROOT / "horoplug" / "kernels.fatbin"

OPTIONS = ["--std=c++17", "--fmad=false"]
# Code for an architecture also runs on later ones of the same major version. PTX of the oldest serves all others.
ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
OLDEST = 12000  # the CUDA version of the oldest driver that the core supports

HEADER = struct.Struct("<8sQQQii14i")
MAGIC = b"hpfatbi1"


def fnv(*texts: bytes) -> int:
    """The core's Hash (csrc/base/hash.h) of texts."""
    value = 0xCBF29CE484222325
    for text in texts:
        for byte in text + b"\0":
            value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value or 1


def source_key() -> int:
    """The hash of the source, equal to the core's source_key()."""
    files = [
        SOURCES / "kernels.cu",
        ROOT / "csrc" / "include" / "horoplug" / "dtypes.def",
        *sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.def"))),
    ]
    return fnv(*(option.encode() for option in OPTIONS), *(file.read_bytes() for file in files))


def pack(code: bytes, version: int, archs: Iterable[int], ptx: int) -> bytes:
    """The contents of the kernel file. ``version``: of nvcc, 12040 for 12.4; ``archs`` and ``ptx``: the architectures
    of the machine code and of the PTX, 75 for sm_75."""
    slots = [*archs, *[0] * 14][:14]
    return HEADER.pack(MAGIC, source_key(), len(code), fnv(code), version, ptx, *slots) + code


def find_nvcc() -> str:
    """Path of the compiler. Raises SystemExit if it is not found."""
    home = os.environ.get("CUDA_HOME")
    path = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    found = shutil.which("nvcc", path=path)
    if not found:
        raise SystemExit("nvcc not found: put it into PATH, or set CUDA_HOME to CUDA's folder")
    return found


def ask(nvcc: str, option: str) -> str:
    """The compiler's output for an option. Raises SystemExit if it fails."""
    done = subprocess.run([nvcc, option], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{nvcc} {option} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def version_of(nvcc: str) -> int:
    """The compiler's version, 12040 for 12.4. Raises SystemExit if it is too old."""
    found = re.search(r"release (\d+)\.(\d+)", ask(nvcc, "--version"))
    version = 1000 * int(found[1]) + 10 * int(found[2]) if found else 0
    if version < OLDEST:
        raise SystemExit(f"{nvcc} is too old: CUDA {OLDEST // 1000}.0 or newer is needed")
    return version


def archs_of(nvcc: str, wanted: list[int]) -> list[int]:
    """The architectures to compile for: those in ``wanted``, by default all of ARCHS that the compiler supports. Raises
    SystemExit if the compiler lacks one."""
    known = {int(arch) for arch in re.findall(r"^sm_(\d+)$", ask(nvcc, "--list-gpu-code"), re.M)}
    unknown = [str(arch) for arch in wanted if arch not in known]
    if unknown:
        raise SystemExit(f"{nvcc} does not compile for sm_{', sm_'.join(unknown)}")
    chosen = sorted(wanted or known.intersection(ARCHS))
    if not chosen:
        raise SystemExit(f"{nvcc} compiles for none of {ARCHS}")
    return chosen


def compile_kernels(nvcc: str, archs: list[int]) -> bytes:
    """Machine code for each architecture, and PTX for the first one, as one fatbin."""
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs[1:]]
    first = archs[0]
    targets.append(f"-gencode=arch=compute_{first},code=[sm_{first},compute_{first}]")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "kernels.fatbin")
        include = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'include'}"]
        options = [*OPTIONS, "-Xfatbin=-compress-all", "--threads=0", *include]
        command = [
            nvcc,
            "-fatbin",
            *options,
            *targets,
            "-o",
            str(made),
            str(SOURCES / "kernels.cu"),
        ]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise SystemExit("nvcc cannot compile the kernels: see its messages above")
        return made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--archs", default="", help=f"architectures, such as 75,90; by default all of {ARCHS}"
    )
    parser.add_argument("--out", type=Path, default=FILE, help="path of the file [%(default)s]")
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    version = version_of(nvcc)
    archs = archs_of(nvcc, [int(arch) for arch in re.split("[, ]+", arguments.archs) if arch])
    named = ", ".join(f"sm_{arch}" for arch in archs)
    print(
        f"{nvcc} ({version // 1000}.{version % 1000 // 10}) compiles for {named} and later ones",
        flush=True,
    )
    content = pack(compile_kernels(nvcc, archs), version, archs, archs[0])
    # Written under another name first, so that a reader never sees an incomplete file.
    partial = arguments.out.with_name(f"{arguments.out.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(arguments.out)
    print(f"{arguments.out}: {len(content) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
