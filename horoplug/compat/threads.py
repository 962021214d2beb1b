"""``horovod.runner.util.threads``: calls functions in new threads."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call ``target(*args)`` in a new thread and return the thread. ``silent``: ignore exceptions."""
    if not isinstance(args, tuple):
        raise ValueError(
            f"args must be a tuple, not {type(args)}, for a single argument use (arg,)"
        )

    def run() -> None:
        with contextlib.suppress(BaseException) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call ``func(*args)`` in a new thread once ``event`` is set, unless ``stop`` is set before. Returns the thread.

    ``stop`` is checked every ``check_stop_interval_s`` seconds; a non-daemon thread requires it."""
    if event is None:
        raise ValueError("Event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(
            f"args must be a tuple, not {type(args)}, for a single argument use (arg,)"
        )
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def run() -> None:
        if stop is None:
            event.wait()
        else:
            while not stop.is_set() and not event.wait(check_stop_interval_s):
                pass
            if stop.is_set():
                return
        func(*args)

    return in_thread(run, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call ``fn(*args)`` for each ``args`` in the list, with up to ``max_concurrent_executions`` threads.

    Returns the results by position in the list; without ``block_until_all_done``, returns None at once. Raises
    RuntimeError if a call has failed; its traceback is printed."""
    waiting: queue.SimpleQueue[tuple[int, Sequence[Any]]] = queue.SimpleQueue()
    for call in enumerate(args_list):
        waiting.put(call)
    results: dict[int, Any] = {}

    def run() -> None:
        while True:
            try:
                position, args = waiting.get_nowait()
            except queue.Empty:
                return
            results[position] = fn(*args)

    threads = [
        in_thread(run, daemon=not block_until_all_done)
        for _ in range(min(max_concurrent_executions, len(args_list)))
    ]
    if not block_until_all_done:
        return None
    for thread in threads:
        thread.join()
    if len(results) < len(args_list):
        raise RuntimeError(f"{len(args_list) - len(results)} calls of {fn} have failed")
    return results
