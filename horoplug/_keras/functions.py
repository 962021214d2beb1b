"""What callbacks and states do with variables, on any backend and with Keras 2: read, write, broadcast."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from horoplug.base.errors import HorovodInternalError
from horoplug.common.objects import allgather_object
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.variants import synchronize
from horoplug.numpy import broadcast_async_


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The variables of an optimizer; none if there is no optimizer."""
    found = getattr(optimizer, "variables", ())
    return list(found() if callable(found) else found)  # a method in older versions


def weights(model: Any, optimizer: Any = None) -> list[Any]:
    """What is the same on all ranks: a model's weights (not the states of its random numbers and metrics), and the
    variables of an optimizer, by default of the model's (not the gradients that it accumulates)."""
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = getattr(inner, "_accumulated_gradients", None) or ()
    return [*model.weights, *without(optimizer_variables(optimizer), accumulated)]


def read(variable: Any) -> np.ndarray[Any, Any]:
    """A copy of a variable's value."""
    return np.array(variable.numpy(), order="C")


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite variables of Keras (in the same order on every rank) with those of rank `root_rank` (a global rank), on
    the ranks of the set.

    Raises HorovodInternalError on all ranks, unless all have variables of the same shapes and dtypes."""
    values = [read(variable) for variable in variables]
    _check_same([(v.shape, str(v.dtype)) for v in values], variables, root_rank, process_set)
    handles = [
        broadcast_async_(value, root_rank, f"broadcast_variables.{place}", process_set)
        for place, value in enumerate(values)
    ]
    for handle in handles:
        synchronize(handle)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _check_same(
    mine: list[Any], variables: Sequence[Any], root_rank: int, process_set: ProcessSet
) -> None:
    names = [getattr(v, "path", getattr(v, "name", "")) for v in variables]
    ranks = process_set.ranks or []
    gathered = allgather_object((mine, names), "broadcast_variables", process_set)
    theirs = dict(zip(ranks, gathered, strict=True))
    expected, names = theirs[root_rank]
    for rank, (found, _) in theirs.items():
        if len(found) != len(expected):
            raise HorovodInternalError(
                f"broadcast of variables: rank {root_rank} has {len(expected)} of them, rank {rank} has {len(found)}; "
                "all ranks need the same model and optimizer."
            )
        for (shape, dtype), (other_shape, other_dtype), name in zip(
            expected, found, names, strict=True
        ):
            if (shape, dtype) != (other_shape, other_dtype):
                raise HorovodInternalError(
                    f"broadcast of variables: {name} is {dtype}{list(shape)} on rank {root_rank} and "
                    f"{other_dtype}{list(other_shape)} on rank {rank}; all ranks need the same model and optimizer."
                )


def without(variables: Iterable[Any], left_out: Iterable[Any]) -> list[Any]:
    """The variables that are not among others."""
    ids = {id(variable) for variable in left_out}
    return [variable for variable in variables if id(variable) not in ids]
