"""Reading, writing and broadcasting variables of any backend and of Keras 2, for callbacks and elastic states."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from horoplug.base.errors import HorovodInternalError
from horoplug.common.keras_updates import optimizer_variables
from horoplug.common.objects import allgather_object
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.variants import synchronize
from horoplug.numpy import broadcast_async_


def weights(model: Any, optimizer: Any = None) -> list[Any]:
    """The variables that all ranks have in common: the weights of a model, without the states of random generators and
    metrics, and the variables of an optimizer, without accumulated gradients. ``optimizer``: by default the model's."""
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulated = getattr(inner, "_accumulated_gradients", None) or ()
    return [*model.weights, *without(optimizer_variables(optimizer), accumulated)]


def read(variable: Any) -> np.ndarray[Any, Any]:
    """A copy of a variable's value."""
    return np.array(variable.numpy(), order="C")


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite Keras variables with the values that rank `root_rank` (a global rank) has, on all ranks of the set. The
    variables have the same order on every rank.

    Raises HorovodInternalError on all ranks if the shapes or dtypes of the variables differ between ranks."""
    values = [read(variable) for variable in variables]
    _check_shapes_and_dtypes(
        [(v.shape, str(v.dtype)) for v in values], variables, root_rank, process_set
    )
    handles = [
        broadcast_async_(value, root_rank, f"broadcast_variables.{i}", process_set)
        for i, value in enumerate(values)
    ]
    for handle in handles:
        synchronize(handle)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _check_shapes_and_dtypes(
    own: list[Any], variables: Sequence[Any], root_rank: int, process_set: ProcessSet
) -> None:
    names = [getattr(v, "path", getattr(v, "name", "")) for v in variables]
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(
            f"broadcast of variables: root rank {root_rank} does not exist; there are ranks {ranks}"
        )
    gathered = allgather_object((own, names), "broadcast_variables", process_set)
    by_rank = dict(zip(ranks, gathered, strict=True))
    expected, names = by_rank[root_rank]
    for rank, (found, _) in by_rank.items():
        if len(found) != len(expected):
            raise HorovodInternalError(
                f"broadcast of variables: rank {root_rank} has {len(expected)} variables, rank {rank} has "
                f"{len(found)}; all ranks need the same model and optimizer"
            )
        for (shape, dtype), (other_shape, other_dtype), name in zip(
            expected, found, names, strict=True
        ):
            if (shape, dtype) != (other_shape, other_dtype):
                raise HorovodInternalError(
                    f"broadcast of variables: {name} is {dtype}{list(shape)} on rank {root_rank} and "
                    f"{other_dtype}{list(other_shape)} on rank {rank}; all ranks need the same model and optimizer"
                )


def without(variables: Iterable[Any], excluded: Iterable[Any]) -> list[Any]:
    """The variables that are not in ``excluded``."""
    ids = {id(variable) for variable in excluded}
    return [variable for variable in variables if id(variable) not in ids]
