"""Losses and metrics of a model with one or several outputs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horoplug.numpy.metrics import as_numbers
from horoplug.spark.common.errors import EstimatorError

Tensors = Sequence[torch.Tensor]
Function = Callable[[torch.Tensor, torch.Tensor], Any]


def per_output(value: Any, number: int, what: str) -> list[Any]:
    """A value for each output. Raises EstimatorError for a list of another length."""
    if not isinstance(value, (list, tuple)):
        return [value] * number
    if len(value) != number:
        raise EstimatorError(f"{what} has {len(value)} items for {number} label_cols")
    return list(value)


def unreduced(loss: Any) -> Function:
    """A loss that returns one value, or several, for each row. Raises EstimatorError for a loss that cannot."""
    if isinstance(getattr(loss, "reduction", None), str):
        loss = copy.copy(loss)
        loss.reduction = "none"
        return loss  # type: ignore[no-any-return]
    try:
        known = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        known = False
    if not known:
        raise EstimatorError(
            f"sample_weight_col needs a loss with an argument reduction='none', which {name_of(loss)} does not have"
        )
    return functools.partial(loss, reduction="none")


def name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def matched(outputs: Tensors, labels: Tensors) -> list[torch.Tensor]:
    """Labels with the shape and dtype of their output, if they have as many elements. Labels that are classes keep
    theirs."""
    if len(outputs) != len(labels):
        raise EstimatorError(f"the model has {len(outputs)} outputs for {len(labels)} label_cols")
    return [
        label.reshape(output.shape).to(output.dtype)
        if output.is_floating_point() and output.numel() == label.numel()
        else label
        for output, label in zip(outputs, labels, strict=True)
    ]


class Loss:
    """The weighted sum of the losses of all outputs. The weights of rows make it a weighted average over rows."""

    def __init__(
        self, losses: Any, weights: Sequence[float] | None, outputs: int, weighted_rows: bool
    ) -> None:
        functions = per_output(losses, outputs, "loss")
        self._functions = [unreduced(each) for each in functions] if weighted_rows else functions
        self._weights = list(weights) if weights else [1 / outputs] * outputs

    def __call__(
        self, outputs: Tensors, labels: Tensors, rows: torch.Tensor | None
    ) -> torch.Tensor:
        total: Any = 0.0
        for function, weight, output, label in zip(
            self._functions, self._weights, outputs, labels, strict=True
        ):
            value = function(output, label)
            if rows is not None:
                value = value.reshape(len(rows), -1).mean(1)
                value = (value * rows.to(value.dtype)).sum() / rows.sum()
            total = total + weight * value
        return total  # type: ignore[no-any-return]


class Metrics:
    """Functions of (output, label), with a name for each output that they are computed for."""

    def __init__(self, metrics: Sequence[Any] | None, labels: Sequence[str]) -> None:
        self._parts: list[tuple[str, int, Function]] = []
        each = [m if isinstance(m, (list, tuple)) else None for m in metrics or ()]
        if each and all(part is not None for part in each):  # a list for each output
            lists = per_output(list(metrics or ()), len(labels), "metrics")
        else:
            lists = [list(metrics or ())] * len(labels)
        for number, (label, functions) in enumerate(zip(labels, lists, strict=True)):
            for function in functions:
                name = name_of(function)
                full = name if len(labels) == 1 else f"{label}_{name}"
                self._parts.append((full, number, function))

    def __call__(self, outputs: Tensors, labels: Tensors) -> dict[str, Any]:
        """Numbers, and whatever else the functions return."""
        return {
            name: _number(function(outputs[number], labels[number]))
            for name, number, function in self._parts
        }


def _number(value: Any) -> Any:
    """A number, or a tensor with one element, as float, and arrays as those of NumPy."""
    array = as_numbers(value)
    if array is None:
        return value
    return float(array.item()) if array.size == 1 else array
