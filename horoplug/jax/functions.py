"""Broadcast and allgather of pytrees and Python objects, such as the initial state of training."""

from typing import Any, TypeVar, cast

import jax
import numpy as np

from horoplug.common import calls, objects
from horoplug.common.partition import split_group
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.jax import eager
from horoplug.jax.order import wait_for_programs

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

Tree = TypeVar("Tree")


def broadcast_parameters(
    params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Tree:
    """Returns a pytree like ``params`` with the leaves of rank `root_rank` (a global rank).

    JAX arrays (including ``jax.random`` keys) and NumPy arrays keep their dtypes; other leaves are sent as Python
    objects. The tree structure, the shapes and the dtypes are the same on all ranks.

    Raises TypeError inside of ``jax.jit``, and HorovodInternalError if the ranks disagree or a rank has failed.

    ``process_set``: by default all ranks of the job.

    Example, on two ranks:

        params = {"w": jnp.array([1.0 + hvd.rank(), 2.0]), "name": f"of rank {hvd.rank()}"}
        hvd.broadcast_parameters(params, root_rank=0)  # -> {"w": [1.0, 2.0], "name": "of rank 0"}
    """
    return cast(Tree, _broadcast(params, root_rank, "broadcast_parameters", process_set))


def broadcast_optimizer_state(
    state: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Tree:
    """:func:`broadcast_parameters` for the state of an optax optimizer.

    Returns a state like ``state`` with the leaves of rank `root_rank`. ``process_set``: by default all ranks of the
    job. Raises the exceptions of :func:`broadcast_parameters`.

    Example, on two ranks:

        optimizer = optax.sgd(0.1, momentum=0.9)
        params = {"w": jnp.array([1.0, 2.0])}
        state = optimizer.init(params)
        gradients = {"w": jnp.array([1.0, 1.0]) * (1 + hvd.rank())}
        updates, state = optimizer.update(gradients, state, params)
        state = hvd.broadcast_optimizer_state(state, root_rank=0)
        state[0].trace  # -> {"w": [1.0, 1.0]}
    """
    return cast(Tree, _broadcast(state, root_rank, "broadcast_optimizer_state", process_set))


def _broadcast(tree: Any, root_rank: int, name: str, process_set: ProcessSet) -> Any:
    leaves, structure = jax.tree_util.tree_flatten(tree)
    call = calls.broadcast(root_rank, process_set=process_set)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(f"{name} cannot be used inside of jax.jit; use hvd.broadcast there")
    arrays: dict[int, Any] = {}
    others: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if _is_key(leaf):
            arrays[i] = jax.random.key_data(leaf)
        elif isinstance(leaf, jax.Array | np.ndarray):
            arrays[i] = leaf
        else:
            others[i] = leaf
    received: dict[int, Any] = {}
    indices = list(arrays)
    for part in split_group(None, [array.dtype.name for array in arrays.values()], str):
        named = call._replace(name=f"{name}.{part.key}")
        results = eager.perform("broadcast", part.select(list(arrays.values())), named)
        outputs = (output for output, _ in results)
        received.update(zip(part.select(indices), outputs, strict=True))
    if others:
        received |= broadcast_object(others, root_rank, f"{name}.others", process_set)
    for i, leaf in enumerate(leaves):
        if _is_key(leaf):
            kind = jax.random.key_impl(leaf)
            received[i] = jax.random.wrap_key_data(received[i], impl=kind)
    return jax.tree_util.tree_unflatten(structure, [received[i] for i in range(len(leaves))])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object (``obj``) of rank `root_rank` on every rank. Objects of other ranks are ignored. The object
    must be picklable.

    ``name`` pairs the calls of the ranks. ``process_set``: by default all ranks of the job. Raises the exceptions of
    :func:`horoplug.broadcast_object`.

    Example, on two ranks:

        settings = {"epochs": 3} if hvd.rank() == 0 else None
        hvd.broadcast_object(settings, root_rank=0)  # -> {"epochs": 3}
    """
    wait_for_programs()
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects (``obj``) of all ranks of the set in rank order. They must be picklable.

    ``name`` pairs the calls of the ranks. ``process_set``: by default all ranks of the job. Raises the exceptions of
    :func:`horoplug.allgather_object`.

    Example, on two ranks:

        hvd.allgather_object({"rank": hvd.rank()})  # -> [{"rank": 0}, {"rank": 1}]
    """
    wait_for_programs()
    return objects.allgather_object(obj, name, process_set)
