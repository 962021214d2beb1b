"""Values that ranks report to the callbacks of ``RayExecutor.run`` while a function runs."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["configure", "log"]


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
    this does nothing.

    ``info_dict``: a dict that can be pickled. Raises nothing.

    Example, in a cluster with two CPUs:

        from horoplug.ray import RayExecutor

        def work():
            import horoplug as hvd
            from horoplug.ray import ray_logger

            hvd.init()
            ray_logger.log({"rank": hvd.rank()})

        reported = []
        with RayExecutor(num_workers=2) as executor:
            executor.start()
            executor.run(work, callbacks=[reported.append])
        sorted(info["rank"] for info in reported)  # -> [0, 1]
    """
    if _sink.queue is not None:
        _sink.queue.put(info_dict)
