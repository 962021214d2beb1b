"""Where the libraries of CUDA are that wheels have brought."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# As PyPI's wheels have them: nvidia/cu13/lib, nvidia/cuda_nvrtc/lib, nvidia/nccl/lib.
_LIBRARIES = ("libnvrtc.so.*", "libnccl.so.*")


def libraries() -> list[str]:
    """Paths of the CUDA libraries that wheels have brought, the newest versions first."""
    return [str(path) for pattern in _LIBRARIES for path in sorted(_found(pattern), reverse=True)]


def _found(pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace: several folders may have parts of it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isdir(folder):
            yield from Path(folder).glob(f"*/lib/{pattern}")
