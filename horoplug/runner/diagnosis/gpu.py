"""The parts of CUDA that are available, for ``--check-build -v``."""

from __future__ import annotations

from horoplug.common.gpu import files


def lines() -> list[str]:
    """One line for each part of CUDA that horoplug can use: its version, or why it is unusable. Initialises CUDA."""
    from horoplug import _native

    return [f"    {line}" for line in _native.gpu_capabilities(files()).splitlines()]
