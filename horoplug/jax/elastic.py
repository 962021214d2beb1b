"""Training that continues after a failure.

@hvd.elastic.run
def train(state):
    while state.step < 1000:
        state.params, state.opt_state = train_step(state.params, state.opt_state, next(batches))
        state.step += 1
        if state.step % 100 == 0:
            state.commit()

train(hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), step=0))

In a job of ``horovodrun --min-np``, processes that fail are replaced: see :mod:`horoplug.common.elastic`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from horoplug.common.basics import rank
from horoplug.common.elastic import (
    ObjectState,
    Parameters,
    Result,
    check_alike,
    initialize_again,
    run_fn,
)
from horoplug.common.status import says_operation_failed
from horoplug.jax.functions import broadcast_object, broadcast_parameters

__all__ = ["JaxState", "run"]

_TREES = "names of trees"


def run(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a training function (``func``) whose first argument is its state (a :class:`JaxState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails because the job is broken, all ranks restore the last ``state.commit()``, initialise again,
    receive the state of rank 0, and call the function again. The function must contain all collective operations of the
    training, and resume from the progress in the state. JAX raises the failure of a compiled program when its results
    are used: what the program has computed may be in the state before, but not in a commit. Other errors are raised to
    the caller, and so is the tenth failure in a row without a commit.

    Returns a function with the same arguments and result.

    Example, on two ranks:

        @hvd.elastic.run
        def train(state, steps):
            while state.step < steps:
                state.params = hvd.allreduce(state.params) + 1.0
                state.step += 1
                state.commit()
            return state.params

        train(hvd.elastic.JaxState(params=jnp.array([0.0]), step=0), 3)  # -> [3.0]
    """
    return run_fn(func, initialize_again, is_failure)


def is_failure(error: BaseException) -> bool:
    """Whether an exception is the failure of a horoplug operation in a compiled program, on all ranks."""
    return isinstance(error, jax.errors.JaxRuntimeError) and says_operation_failed(error)


class JaxState(ObjectState):
    """The state of a training run: ``JaxState(params=params, opt_state=opt_state, step=0)``.

    Each argument (``kwargs``) becomes an attribute, which the training function assigns to: a pytree of JAX and NumPy
    arrays, or any Python object. A commit waits until the arrays are computed and raises the failure of the program
    that should have computed them, and ``sync`` sends them as arrays. Objects are saved as in :class:`ObjectState`.

    ``donated``: whether the program donates the buffers of the state (``jax.jit(..., donate_argnums=...)``), so that a
    commit has to copy them. If False, a commit keeps references to the arrays, which never change, and copies nothing
    but NumPy arrays.

    Example, on two ranks:

        state = hvd.elastic.JaxState(params={"w": jnp.array([1.0])}, step=0)
        state.params, state.step = {"w": jnp.array([5.0])}, 1
        state.commit()
        state.params, state.step = {"w": jnp.array([7.0])}, 2
        state.restore()
        state.step, state.params  # -> (1, {"w": [5.0]})
    """

    def __init__(self, *, donated: bool = True, **kwargs: Any) -> None:
        self._donated = donated
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def sync(self) -> None:
        current = {name: getattr(self, name) for name in self._saved_state}
        trees = [name for name, value in current.items() if _has_arrays(value)]
        others = {name: value for name, value in current.items() if name not in trees}
        check_alike(_parts({name: current[name] for name in trees}))
        kept = {name: self._keep(value) for name, value in others.items()}
        # With what else is in the trees, so that all ranks learn of what cannot be pickled.
        leaves = {name: _objects(current[name]) for name in trees}
        found = self._broadcast({**kept, **leaves, _TREES: trees})
        trees = found.pop(_TREES)
        for name, value in found.items():
            if name not in trees:
                self._put_back(name, value)
        for name in trees:
            setattr(self, name, broadcast_parameters(getattr(self, name)))
        self.save()

    def _copy(self, value: Any) -> Any:
        if not _has_arrays(value):
            return super()._copy(value)
        copies = jax.tree_util.tree_map(self._copy_leaf, value)
        return jax.block_until_ready(copies)

    def _copy_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if isinstance(leaf, jax.Array):
            return jax.numpy.copy(leaf) if self._donated else leaf
        return super()._copy(leaf)


def _parts(trees: dict[str, Any]) -> dict[str, str]:
    """The type and shape of each array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype} {list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, jax.Array | np.ndarray)
    }


def _objects(tree: Any) -> dict[str, Any]:
    """What is no array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in leaves
        if not isinstance(leaf, jax.Array | np.ndarray)
    }


def _has_arrays(value: Any) -> bool:
    try:
        leaves = jax.tree_util.tree_leaves(value)
    except (TypeError, ValueError):  # a dictionary whose keys have no order, which is no pytree
        return False
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
