"""Functions of ``horovod.ray.utils`` that other packages call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def detect_nics(
    settings: Any, all_host_names: Sequence[str] = (), node_workers: Sequence[Any] | None = None
) -> list[str]:
    """The network interfaces that ``settings.nics`` names. The ranks find others by themselves, in ``init()``."""
    nics = getattr(settings, "nics", None)
    return [nics] if isinstance(nics, str) else sorted(nics or ())


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """The variables by which the ranks use a network interface, if exactly one is named."""
    names = list(nics)
    return {"HOROVOD_GLOO_IFACE": names[0]} if len(names) == 1 else {}


def map_blocking(fn: Any, collection: Iterable[Any]) -> list[Any]:
    """Call ``fn``, which returns a reference of Ray, for each item; returns the values."""
    import ray

    return list(ray.get([fn(each) for each in collection]))
