"""Averages of metrics over the ranks: of numbers and of arrays of numbers, such as a value for each class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from horoplug.base.log import logger
from horoplug.common.basics import rank
from horoplug.common.objects import allgather_object
from horoplug.common.reduce_ops import Sum
from horoplug.numpy.operations import allreduce

Array = np.ndarray[Any, Any]


class MetricAverages:
    """Averages metrics, and says once on rank 0 which of them cannot be averaged. ``caller``: for this message."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._said: set[str] = set()

    def __call__(self, values: Mapping[str, Any], weight: float = 1.0) -> dict[str, Any]:
        """The averages over the ranks, by name: numbers as ``float``, arrays as NumPy arrays of float64. Collective;
        all ranks have the same names. Metrics that cannot be averaged are left out.

        ``weight``: of this rank's values in the average. With 0, the rank needs no values, but their names."""
        if not values:
            return {}
        arrays = {name: as_numbers(values[name]) for name in sorted(values)}
        forms = {
            name: _form(values[name], array) if weight else None for name, array in arrays.items()
        }
        # The operations' names contain those of the metrics, so that an error shows how the ranks differ.
        title = f"metrics.{','.join(arrays)}"
        shapes = self._agreed(allgather_object((rank(), forms), name=title))
        if not shapes:
            return {}
        parts = [
            # 0 * NaN is not 0.
            weight * np.asarray(arrays[name]) if weight else np.zeros(shape)
            for name, shape in shapes.items()
        ]
        mine = np.concatenate([[weight], *(np.ravel(part) for part in parts)])
        total, *sums = allreduce(mine, name=f"{title}.sum", op=Sum)
        averages, begin = np.array(sums) / total, 0
        result: dict[str, Any] = {}
        for name, shape in shapes.items():
            end = begin + int(np.prod(shape))
            part = averages[begin:end].reshape(shape)
            result[name], begin = part if shape else float(part), end
        return result

    def _agreed(self, forms: list[tuple[int, dict[str, Any]]]) -> dict[str, tuple[int, ...]]:
        """The shapes of the metrics that all ranks can average."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in forms[0][1]:
            known = {
                form[name]: number for number, form in reversed(forms) if form[name] is not None
            }
            if all(isinstance(form, tuple) for form in known) and len(known) <= 1:
                shapes[name] = next(iter(known), ())
            elif rank() == 0 and name not in self._said:
                self._said.add(name)
                logger.warning(
                    "%s: the metric %r cannot be averaged, because it is %s; every rank keeps its own value",
                    self._caller,
                    name,
                    " and ".join(
                        f"{_text(form)} on rank {known[form]}" for form in reversed(known)
                    ),
                )
        return shapes


class RowAverages:
    """Averages of a rank's metrics over the rows of its batches, and then over the rows of all ranks."""

    def __init__(self) -> None:
        self.rows = 0
        self._sums: dict[str, Any] = {}

    def add(self, rows: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            array, before = as_numbers(value), self._sums.get(name)
            if array is None:
                self._sums[name] = value
                continue
            if before is None:
                self._sums[name] = np.asarray(rows * array)
            elif isinstance(before, np.ndarray):
                same = array.shape == before.shape
                self._sums[name] = (
                    np.asarray(before + rows * array)
                    if same
                    else _Varying(before.shape, array.shape)
                )
        self.rows += rows

    def of_all_ranks(
        self, averages: MetricAverages, names: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Numbers, and lists for arrays, by name. Collective. ``names``: of the metrics, for a rank without rows."""
        own = {
            name: value / self.rows if isinstance(value, np.ndarray) else value
            for name, value in self._sums.items()
        }
        values = {name: own.get(name) for name in (names if names is not None else own)}
        found = averages(values, weight=self.rows)
        return {name: plain(found[name]) for name in values if name in found}


class _Varying(NamedTuple):
    """Stands for an array that had another shape in an earlier batch."""

    before: tuple[int, ...]
    then: tuple[int, ...]


def as_numbers(value: Any) -> Array | None:
    """A number, a tensor of any framework or a list as an array of float64. None for what is not made of real
    numbers."""
    if isinstance(value, _Varying):
        return None
    if hasattr(value, "detach"):  # a tensor of PyTorch, which may need gradients or be on a GPU
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    try:
        array = np.asarray(value)
        # Kind V: a dtype of another package, such as bfloat16.
        return array.astype("float64") if array.dtype.kind in "biufV" else None
    except (TypeError, ValueError):  # such as lists of different lengths
        return None


def plain(value: Any) -> Any:
    """A metric as a number, or as a list for JSON; None for what is not made of numbers."""
    array = as_numbers(value)
    return None if array is None else array.tolist()


def line(metrics: Mapping[str, Any]) -> str:
    """Numbers and lists of numbers in one line."""
    texts = (
        f"{name} {np.array2string(np.asarray(value), precision=4, separator=', ')}"
        if isinstance(value, list)
        else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )
    return " ".join(", ".join(texts).split())


def _form(value: Any, array: Array | None) -> tuple[int, ...] | str:
    if isinstance(value, _Varying):
        return f"of shape {value.before} in one batch and {value.then} in another"
    return f"a {type(value).__name__}" if array is None else array.shape


def _text(form: tuple[int, ...] | str) -> str:
    return form if isinstance(form, str) else f"of shape {form}" if form else "a number"
