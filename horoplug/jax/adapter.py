"""JAX's arrays for the core, outside of compiled programs: they pass as NumPy arrays, on CPUs without a copy."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from horoplug.common import dtypes, ops
from horoplug.common.opspec import BY_NAME, Call
from horoplug.jax import cards
from horoplug.jax.order import wait_for_programs
from horoplug.numpy.adapter import NumpyAdapter

_ALIGNMENT = 64  # of memory that JAX uses as it is


class _Adapter(NumpyAdapter):
    def empty_like(self, tensor: Any) -> tuple[Any, int]:
        memory = np.empty(tensor.nbytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        made = memory[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        return made, memory.ctypes.data + start


_ADAPTER = _Adapter()


def to_array(value: Any) -> Any:
    """A leaf of the user's pytree as an array of JAX. TypeError for what is none, ValueError for a dtype that the core
    does not know."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float)):
        raise TypeError(f"expected an array, got {type(value).__name__}.")
    array = jax.numpy.asarray(value)
    if array.dtype.name not in dtypes.CODES:
        raise dtypes.unsupported(array.dtype, dtypes.NAMES)
    return array


def perform(operation: str, arrays: Sequence[Any], call: Call) -> list[tuple[Any, Any]]:
    """An operation on concrete arrays of one dtype, of JAX or NumPy. For each: the output, where the array is, and for
    alltoall the rows received from each rank (otherwise None). Raises as :func:`horoplug.common.ops.submit` does.

    Arrays on a card stay there. A group that is on both is two operations."""
    on_card = [place for place, array in enumerate(arrays) if cards.is_on_card(array)]
    if not on_card:
        return _perform_on_host(operation, arrays, call)
    if len(on_card) == len(arrays):
        return cards.perform(operation, arrays, call)
    on_host = [place for place in range(len(arrays)) if place not in on_card]
    results = dict(
        zip(on_host, _perform_on_host(operation, [arrays[i] for i in on_host], call), strict=True)
    )
    named = call._replace(name=f"{call.name}.gpu" if call.name else call.name)
    results.update(
        zip(on_card, cards.perform(operation, [arrays[i] for i in on_card], named), strict=True)
    )
    return [results[place] for place in range(len(arrays))]


def _perform_on_host(operation: str, arrays: Sequence[Any], call: Call) -> list[tuple[Any, Any]]:
    wait_for_programs()
    spec = BY_NAME[operation]
    tensors = [np.asarray(array) for array in arrays]
    if len(tensors) == 1:
        results = [ops.perform(_ADAPTER, spec, tensors, call)]
    else:
        results = ops.perform(_ADAPTER, spec, tensors, call, grouped=True)
    if not spec.received_splits:
        results = [(result, None) for result in results]
    return [
        (jax.device_put(result, array.sharding) if isinstance(array, jax.Array) else result, counts)
        for array, (result, counts) in zip(arrays, results, strict=True)
    ]
