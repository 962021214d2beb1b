"""Where the libraries of CUDA are that wheels have brought, and the kernels that nvcc has compiled."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# As PyPI's wheels have them: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib, nvidia/nccl/lib.
_LIBRARIES = ("libnvrtc.so.*", "libnccl.so.*")


_KERNELS = Path(__file__).resolve().parent.parent / "kernels.fatbin"


def files() -> list[str]:
    """Paths of what the core takes of CUDA: :func:`libraries`, and the file of kernels, if there is one.

    ``HOROPLUG_KERNELS`` names one in place of the package's own."""
    named = os.environ.get("HOROPLUG_KERNELS")
    kernels = [named] if named else [str(_KERNELS)] if _KERNELS.exists() else []
    return [*libraries(), *kernels]


def libraries() -> list[str]:
    """Paths of the CUDA libraries that wheels have brought, the newest versions first."""
    return [str(path) for pattern in _LIBRARIES for path in sorted(_found(pattern), reverse=True)]


def _found(pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace: several folders may have parts of it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isdir(folder):
            yield from Path(folder).glob(f"*/lib/{pattern}")
