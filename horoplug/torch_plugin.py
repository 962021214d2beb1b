"""Registers the backend "horoplug" of ``torch.distributed``.

PyTorch calls :func:`autoload` at the end of ``import torch``, by the entry point ``torch.backends`` of this package.
It must be fast, and must not fail: the backend itself is imported when a process group is created."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from horoplug.base.config import value

BACKEND = "horoplug"


def autoload() -> None:
    """Register the backend. Never raises, because an exception would break ``import torch``."""
    try:
        register()
    except Exception as error:
        warnings.warn(
            f"horoplug cannot register its backend of torch.distributed: {error}", stacklevel=2
        )


def register() -> None:
    """Register the backend with ``torch.distributed``, and as "gloo" if HOROPLUG_AS_GLOO=1. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or BACKEND.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    # From 2.15 on, PyTorch adds a hook that records operations to the groups of all other backends. A group whose class
    # is in Python cannot have it.
    without_hook = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(without_hook, set):
        without_hook.add(BACKEND)
    if value("AS_GLOO"):
        _c10d().replace_gloo()


def _create(options: Any, _: Any = None) -> Any:
    """Create the process group of this rank. PyTorch calls it on every member of a new group."""
    return _c10d().ProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
        enable_reconfigure=getattr(options, "enable_reconfigure", False),
    )


def _c10d() -> Any:
    return import_module("horoplug.torch.c10d")
