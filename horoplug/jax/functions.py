"""Start from the same state everywhere: pytrees and objects from one rank to all."""

from typing import Any

import jax
import numpy as np

from horoplug.common import calls, objects
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.jax import adapter
from horoplug.jax.order import wait_for_programs

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """A pytree with the leaves of rank `root_rank` (a global rank): arrays of JAX (keys of ``jax.random``, too) and of
    NumPy keep their dtypes, other leaves are sent as objects. The tree, the shapes and dtypes are the same on all
    ranks. Not for the inside of ``jax.jit``."""
    return _broadcast(params, root_rank, "broadcast_parameters", process_set)


def broadcast_optimizer_state(
    state: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """The same for the state of an optimizer of optax."""
    return _broadcast(state, root_rank, "broadcast_optimizer_state", process_set)


def _broadcast(tree: Any, root_rank: int, name: str, process_set: ProcessSet) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    call = calls.broadcast(root_rank, process_set=process_set)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(f"{name} is not for the inside of jax.jit; use hvd.broadcast there.")
    arrays: dict[int, Any] = {}
    others: dict[int, Any] = {}
    for place, leaf in enumerate(leaves):
        if _is_key(leaf):
            arrays[place] = jax.random.key_data(leaf)
        elif isinstance(leaf, jax.Array | np.ndarray):
            arrays[place] = leaf
        else:
            others[place] = leaf
    received: dict[int, Any] = {}
    by_dtype: dict[str, list[int]] = {}
    for place, array in arrays.items():
        by_dtype.setdefault(array.dtype.name, []).append(place)
    for dtype, places in by_dtype.items():
        named = call._replace(name=f"{name}.{dtype}")
        results = adapter.perform("broadcast", [arrays[place] for place in places], named)
        received.update(zip(places, (output for output, _ in results), strict=True))
    if others:
        received |= broadcast_object(others, root_rank, f"{name}.others", process_set)
    for place, leaf in enumerate(leaves):
        if _is_key(leaf):
            kind = jax.random.key_impl(leaf)
            received[place] = jax.random.wrap_key_data(received[place], impl=kind)
    return jax.tree_util.tree_unflatten(structure, [received[i] for i in range(len(leaves))])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on every rank; what other ranks pass is ignored. It must be picklable."""
    wait_for_programs()
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the set, in the order of the ranks. They must be picklable."""
    wait_for_programs()
    return objects.allgather_object(obj, name, process_set)
