"""Values that ranks report to the callbacks of ``RayExecutor.run`` while a function runs."""

from __future__ import annotations

from typing import Any, Protocol


class _Queue(Protocol):
    def put(self, item: Any) -> None: ...


class _Sink:
    """Where the values of this process go."""

    def __init__(self) -> None:
        self.queue: _Queue | None = None


_sink = _Sink()


def configure(queue: _Queue | None) -> None:
    """Send what :func:`log` is given to a queue of Ray (``ray.util.queue.Queue``); None: to nowhere."""
    _sink.queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Call the callbacks of ``RayExecutor.run`` with ``info_dict``, in the process of the executor.

    Every rank may call it; the values of one rank arrive in their order. Without callbacks, or outside of an executor,
    this does nothing."""
    if _sink.queue is not None:
        _sink.queue.put(info_dict)
