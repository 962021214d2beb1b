"""Optimizers and gradients of functions that are those of all ranks together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.jax.compression import Compression
from horoplug.jax.reduction import Groups, Reduction


class DistributedState(NamedTuple):
    """The state of :func:`DistributedOptimizer` with ``backward_passes_per_step`` above 1."""

    inner: Any  # the wrapped optimizer's
    passes: jax.Array  # int32: since the last step
    gradients: Any  # their sum since then


def DistributedOptimizer(
    optimizer: Any,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    groups: Groups = None,
) -> Any:
    """An ``optax.GradientTransformation`` that reduces the gradients over the ranks, and then updates as `optimizer`
    does, whose state it has. For ``update`` inside and outside of ``jax.jit``.

    ``backward_passes_per_step``: so many gradients are added up before they are reduced, once. The updates in between
    are zero. ``average_aggregated_gradients``: divide their sum by that number. ``gradient_predivide_factor``: how much
    of the division by the number of ranks is done before the sum. ``groups``: gradients that travel together: how many
    groups, or lists of leaves' paths (``jax.tree_util.keystr``; those in no list travel alone). Default: all of one
    dtype. Raises ImportError without optax."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "horoplug.jax.DistributedOptimizer needs optax: pip install optax."
        ) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"expected an optimizer of optax, got {type(optimizer).__name__}.")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1.")
    reduction = Reduction(
        "DistributedOptimizer", compression, op, gradient_predivide_factor, groups, process_set
    )
    inner = optax.with_extra_args_support(optimizer)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(reduction.reduce(gradients), state, params, **extra)

    if backward_passes_per_step == 1:
        return optax.GradientTransformationExtraArgs(inner.init, update)

    def init_passes(params: Any) -> DistributedState:
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        return DistributedState(inner.init(params), jnp.zeros((), jnp.int32), zeros)

    def update_passes(
        gradients: Any, state: DistributedState, params: Any = None, **extra: Any
    ) -> tuple[Any, DistributedState]:
        total = jax.tree_util.tree_map(
            lambda t, g: (t + g).astype(t.dtype), state.gradients, gradients
        )
        zeros = jax.tree_util.tree_map(jnp.zeros_like, gradients)

        def step() -> tuple[Any, DistributedState]:
            passes = backward_passes_per_step if average_aggregated_gradients else 1
            mean = jax.tree_util.tree_map(
                lambda t, g: (t / passes).astype(g.dtype), total, gradients
            )
            updates, inner_state = update(mean, state.inner, params, **extra)
            cleared = jax.tree_util.tree_map(jnp.zeros_like, total)
            return updates, DistributedState(inner_state, jnp.zeros((), jnp.int32), cleared)

        def wait() -> tuple[Any, DistributedState]:
            return zeros, DistributedState(state.inner, state.passes + 1, total)

        is_last = state.passes + 1 >= backward_passes_per_step
        if isinstance(is_last, jax.core.Tracer):
            result: tuple[Any, DistributedState] = jax.lax.cond(is_last, step, wait)
            return result
        return step() if is_last else wait()

    return optax.GradientTransformationExtraArgs(init_passes, update_passes)


def distributed_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compression: Any = Compression.none,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    groups: Groups = None,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad`` whose gradients are reduced over the ranks; the value is this rank's own. Further options
    are those of ``jax.value_and_grad``, the others those of :func:`DistributedOptimizer`."""
    local = jax.value_and_grad(fun, argnums, has_aux, **options)
    reduction = Reduction(
        "distributed_value_and_grad",
        compression,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
    )

    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = local(*args, **kwargs)
        return value, reduction.reduce(gradients)

    return value_and_grad


def distributed_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """``jax.grad`` whose gradients are reduced over the ranks (with ``has_aux``: ``(gradients, aux)``). The options are
    those of :func:`distributed_value_and_grad`."""
    both = distributed_value_and_grad(fun, argnums, has_aux, **options)

    def grad(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return grad
