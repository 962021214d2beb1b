"""Learning rates: scaling, and schedules whose optimizer is replaced by a DistributedOptimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

# Where optimizers and PyTorch's schedulers keep learning rates.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


def scale(optimizer: Any, schedulers: list[Any], factor: float) -> None:
    """Multiply the learning rates of an optimizer, and those that its schedulers start from."""
    for group in optimizer.param_groups:
        group.update({key: group[key] * factor for key in _IN_GROUPS if key in group})
    for scheduler in _with_parts(schedulers):
        for key in _IN_SCHEDULERS:
            if hasattr(scheduler, key):
                setattr(scheduler, key, [rate * factor for rate in getattr(scheduler, key)])


def redirect(schedulers: list[Any], wrapped: Any) -> None:
    """Let schedulers change ``wrapped`` in place of the optimizer that they were created with. They share parameter
    groups only until a state is loaded."""
    schedulers = [*_with_parts(schedulers)]
    for scheduler in schedulers:
        scheduler.optimizer = wrapped
    if schedulers:
        _count_steps(wrapped)


def _count_steps(optimizer: Any) -> None:
    """A scheduler warns unless it finds these two marks of PyTorch, which it has set on the replaced optimizer."""
    step = optimizer.step

    @functools.wraps(step)
    def counted(*args: Any, **options: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **options)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted


def _with_parts(schedulers: list[Any]) -> Iterator[Any]:
    for scheduler in schedulers:
        yield scheduler
        yield from _with_parts(list(getattr(scheduler, "_schedulers", ())))
