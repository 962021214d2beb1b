"""Operations on concrete arrays, outside of compiled programs.

Arrays on the host are passed to the core as NumPy arrays, on CPUs without a copy. Arrays on a GPU stay there, see
:mod:`horoplug.jax.gpu`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from horoplug.common import dtypes, ops
from horoplug.common.arguments import check_mask, not_a_tensor
from horoplug.common.opspec import BY_NAME, Call
from horoplug.jax import gpu
from horoplug.jax.order import wait_for_programs
from horoplug.jax.primitive import SetPosition, collective_p, output_shape
from horoplug.numpy.adapter import NumpyAdapter

_ALIGNMENT = 64  # bytes; JAX uses NumPy memory of this alignment without a copy


class _Adapter(NumpyAdapter):
    def empty_like(self, tensor: Any) -> tuple[Any, int]:
        memory = np.empty(tensor.nbytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        made = memory[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        return made, memory.ctypes.data + start


_ADAPTER = _Adapter()


def to_array(value: Any) -> Any:
    """Convert a leaf of the user's pytree to a JAX array.

    Raises TypeError for a value that is not an array or a number, ValueError for a dtype that the core does not
    support."""
    check_mask(value)
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise not_a_tensor("an array", value, "jnp.asarray")
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSUMm":
        raise dtypes.unsupported(value.dtype, dtypes.NAMES)
    array = jax.numpy.asarray(value)
    if array.dtype.name not in dtypes.CODES:
        raise dtypes.unsupported(array.dtype, dtypes.NAMES)
    return array


def perform(operation: str, arrays: Sequence[Any], call: Call) -> list[tuple[Any, Any]]:
    """Run an operation on concrete JAX or NumPy arrays of one dtype.

    Returns a pair for each array: the output, on the array's device, and for alltoall the number of rows received from
    each rank (None for other operations). Raises the exceptions of :func:`horoplug.common.ops.submit`.

    A group with arrays on the host and on a GPU becomes two operations."""
    on_gpu = [i for i, array in enumerate(arrays) if gpu.is_on_gpu(array)]
    if not on_gpu:
        return _perform_on_host(operation, arrays, call)
    if len(on_gpu) == len(arrays):
        return gpu.perform(operation, arrays, call)
    on_host = [i for i in range(len(arrays)) if i not in on_gpu]
    results = dict(
        zip(on_host, _perform_on_host(operation, [arrays[i] for i in on_host], call), strict=True)
    )
    named = call._replace(name=f"{call.name}.gpu" if call.name else call.name)
    results.update(
        zip(on_gpu, gpu.perform(operation, [arrays[i] for i in on_gpu], named), strict=True)
    )
    return [results[i] for i in range(len(arrays))]


def _perform_on_host(operation: str, arrays: Sequence[Any], call: Call) -> list[tuple[Any, Any]]:
    wait_for_programs()
    spec = BY_NAME[operation]
    for array in arrays:
        check_mask(array)
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


def _evaluate(*arrays: Any, operation: str, call: Call, position: SetPosition) -> list[Any]:
    """Evaluate the primitive on concrete arrays, which happens under differentiation and vmap outside of jit."""
    outputs = [output for output, _ in perform(operation, arrays, call)]
    for array, output in zip(arrays, outputs, strict=True):
        expected = output_shape(operation, array.shape, call, position)
        if output.shape != expected:
            raise ValueError(
                f"{operation}: differentiation requires arrays of one shape on all ranks; the output has the shape "
                f"{output.shape}, not {expected}"
            )
    return outputs


collective_p.def_impl(_evaluate)
