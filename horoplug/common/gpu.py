"""Paths of the CUDA libraries that are installed as Python packages, and of the kernels that nvcc has compiled."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# In folders of the wheels from PyPI: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib, nvidia/nccl/lib.
_LIBRARIES = ("libnvrtc.so.*", "libnccl.so.*")


_KERNELS = Path(__file__).resolve().parent.parent / "kernels.fatbin"


def files() -> list[str]:
    """Paths for the core: :func:`libraries`, and the file with compiled kernels, if there is one.

    ``HOROPLUG_KERNELS`` names a file that replaces the one in the package."""
    named = os.environ.get("HOROPLUG_KERNELS")
    kernels = [named] if named else [str(_KERNELS)] if _KERNELS.exists() else []
    return [*libraries(), *kernels]


def libraries() -> list[str]:
    """Paths of the CUDA libraries that are installed as Python packages, newest versions first."""
    return [str(path) for pattern in _LIBRARIES for path in sorted(_found(pattern), reverse=True)]


def _found(pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package, which may have several folders
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isdir(folder):
            yield from Path(folder).glob(f"*/lib/{pattern}")
