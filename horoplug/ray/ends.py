"""Ends actors, and waits until their processes have ended. ``ray.kill`` only asks for that, and a process that still
runs could write, for example a checkpoint, beside the one that has taken its place."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoplug.base.processes import descendants, stat

_ASKED_SECONDS = 1.0  # limit for a process to end because Ray has asked it to
_KILLED_SECONDS = 5.0  # limit for it to end after SIGKILL
# Limit for the task that waits on another node, whose process Ray may have to start. Ray ends it if the node is lost.
_TASK_SECONDS = 30.0


class ProcessId(NamedTuple):
    """A process on a node. ``started``: when, in the kernel's ticks, since numbers are used again; ``space``: the
    namespace in which the process has this number."""

    node: str
    pid: int
    started: int
    space: int


def own_process() -> ProcessId:
    """This process, an actor or a task."""
    pid = os.getpid()
    started = _started(pid)
    assert started is not None
    return ProcessId(ray.get_runtime_context().get_node_id(), pid, started, _space())


def end_actors(actors: Sequence[tuple[Any, Any]]) -> None:
    """End actors, each with a reference to the result of its first call, :func:`own_process`, and wait until their
    processes have ended, for a limited time."""
    by_node: dict[str, list[ProcessId]] = {}
    for actor, _ in actors:
        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.kill(actor)
    for _, reference in actors:
        # An actor that has not answered its first call has not begun the function of the job.
        with contextlib.suppress(Exception):
            if ray.wait([reference], timeout=0)[0]:
                process = ray.get(reference)
                by_node.setdefault(process.node, []).append(process)
    with contextlib.suppress(Exception):  # a node has left the cluster
        here = by_node.pop(ray.get_runtime_context().get_node_id(), [])
        tasks = [_end_on(node, processes) for node, processes in by_node.items()]
        end_processes(here)
        if tasks:
            ray.wait(tasks, num_returns=len(tasks), timeout=_TASK_SECONDS)


def _end_on(node: str, processes: list[ProcessId]) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    task = ray.remote(end_processes).options(
        num_cpus=0, max_retries=0, scheduling_strategy=strategy
    )
    return task.remote(processes)


def end_processes(processes: Sequence[ProcessId]) -> None:
    """Wait until processes of this node have ended, which Ray has asked to end, and kill those that do not: a process
    that is stopped, for example."""
    with contextlib.ExitStack() as stack:
        running: dict[int, int] = {}
        for process in processes:
            with contextlib.suppress(OSError):  # it has ended
                fd = os.pidfd_open(process.pid)
                stack.callback(os.close, fd)
                if (_started(process.pid), _space()) == (process.started, process.space):
                    running[fd] = process.pid
        _wait(running, _ASKED_SECONDS)
        children = [child for pid in running.values() for child in descendants(pid)]
        for child in children:  # Ray would have ended them
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(child)
                stack.callback(os.close, fd)
                running[fd] = child
        for fd in running:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        _wait(running, _KILLED_SECONDS)


def _wait(running: dict[int, int], seconds: float) -> None:
    """Wait until processes have ended, and remove them from ``running``, which has them by descriptor."""
    deadline = time.monotonic() + seconds
    ends = select.poll()
    for fd in running:
        ends.register(fd, select.POLLIN)
    while running and (left := deadline - time.monotonic()) > 0:
        for fd, _ in ends.poll(left * 1000):
            ends.unregister(fd)
            del running[fd]


def _started(pid: int) -> int | None:
    """When a process was started; None: there is none."""
    fields = stat(pid)
    return None if fields is None else int(fields[19])


def _space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
