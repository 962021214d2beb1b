#!/usr/bin/env python3
"""Compiles the GPU kernels with nvcc into horoplug/kernels.fatbin, for machines that have no NVRTC.

The options are NVRTC's (csrc/device/cuda/jit/compile.cc), and so are the results' bits. The file begins with a header
by which the core knows that it is whole and of the same source (csrc/device/cuda/jit/kernel_file.h)."""

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
# Code for one is good for later ones of the same major version, too; PTX for the oldest is for all others.
ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
OLDEST = 12000  # as the core's oldest driver

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
    """The core's source_key()."""
    files = [
        SOURCES / "kernels.cu",
        ROOT / "csrc" / "include" / "horoplug" / "dtypes.def",
        *sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.def"))),
    ]
    return fnv(*(option.encode() for option in OPTIONS), *(file.read_bytes() for file in files))


def pack(code: bytes, version: int, archs: Iterable[int], ptx: int) -> bytes:
    """The whole file. ``version``: nvcc's, 12040 is 12.4; ``archs`` and ``ptx``: what it is for, 75 is sm_75."""
    slots = [*archs, *[0] * 14][:14]
    return HEADER.pack(MAGIC, source_key(), len(code), fnv(code), version, ptx, *slots) + code


def find_nvcc() -> str:
    """Path of the compiler; SystemExit if there is none."""
    home = os.environ.get("CUDA_HOME")
    path = f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    found = shutil.which("nvcc", path=path)
    if not found:
        raise SystemExit("nvcc not found: put it into PATH, or set CUDA_HOME to CUDA's folder")
    return found


def ask(nvcc: str, option: str) -> str:
    """What the compiler answers to an option."""
    done = subprocess.run([nvcc, option], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{nvcc} {option} fails: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def version_of(nvcc: str) -> int:
    """Of the compiler, 12040 being 12.4; SystemExit if it is too old."""
    found = re.search(r"release (\d+)\.(\d+)", ask(nvcc, "--version"))
    version = 1000 * int(found[1]) + 10 * int(found[2]) if found else 0
    if version < OLDEST:
        raise SystemExit(f"{nvcc} is too old: CUDA {OLDEST // 1000}.0 or newer is needed")
    return version


def archs_of(nvcc: str, wanted: list[int]) -> list[int]:
    """Those to compile for: what is wanted, by default all of ARCHS that the compiler knows."""
    known = {int(arch) for arch in re.findall(r"^sm_(\d+)$", ask(nvcc, "--list-gpu-code"), re.M)}
    unknown = [str(arch) for arch in wanted if arch not in known]
    if unknown:
        raise SystemExit(f"{nvcc} does not compile for sm_{', sm_'.join(unknown)}")
    chosen = sorted(wanted or known.intersection(ARCHS))
    if not chosen:
        raise SystemExit(f"{nvcc} compiles for none of {ARCHS}")
    return chosen


def compile_kernels(nvcc: str, archs: list[int]) -> bytes:
    """Machine code for each of these, and PTX for the first, as one fatbin."""
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
            raise SystemExit("nvcc cannot compile the kernels: see above")
        return made.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--archs", default="", help="75,90; by default all of " + str(ARCHS))
    parser.add_argument("--out", type=Path, default=FILE)
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
    # Under another name first: who reads it has all of it or nothing.
    partial = arguments.out.with_name(f"{arguments.out.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(arguments.out)
    print(f"{arguments.out}: {len(content) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
