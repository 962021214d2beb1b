"""Optimizers and gradient functions that reduce gradients over the ranks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from horoplug.base.errors import not_an_optimizer
from horoplug.common.compression import AnyCompressor
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.jax.compression import Compression
from horoplug.jax.reduction import Options, Reduction

if TYPE_CHECKING:
    import optax


class DistributedState(NamedTuple):
    """The state of :func:`DistributedOptimizer` with ``backward_passes_per_step`` above 1."""

    inner: Any  # the state of the wrapped optimizer
    passes: jax.Array  # int32: passes since the last step
    gradients: Any  # sum of the gradients since the last step


def DistributedOptimizer(
    optimizer: "optax.GradientTransformation",
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    groups: Groups = None,
) -> "optax.GradientTransformationExtraArgs":
    """An ``optax.GradientTransformation`` that reduces the gradients over the ranks and then updates like `optimizer`.

    Its state is that of `optimizer`, or a :class:`DistributedState` if ``backward_passes_per_step`` is above 1.
    ``update`` works inside and outside of ``jax.jit``.

    ``optimizer``: an ``optax.GradientTransformation``.
    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of your own.
    ``backward_passes_per_step``: number of gradients that are added locally before they are reduced. The updates in
        between are zero.
    ``op``: the reduction: Average, Sum, Adasum, Min, Max or Product.
    ``average_aggregated_gradients``: divide the added gradients by backward_passes_per_step.
    ``gradient_predivide_factor``: with Average, divide by this factor before the sum, and by size / factor after it.
    ``process_set``: the ranks over which gradients are reduced; other ranks use their own gradients.
    ``groups``: gradients that are reduced in one operation: the number of groups, or lists of leaf paths as
        ``jax.tree_util.keystr`` writes them (a leaf in no list is reduced alone). Default: one group for each dtype.

    Raises ImportError if optax is not installed, TypeError if `optimizer` is not an optimizer of optax, and ValueError
    for invalid arguments.

    Example, on two ranks:

        optimizer = hvd.DistributedOptimizer(optax.sgd(0.25 * hvd.size()))
        params = {"w": jnp.array([1.0, 1.0])}
        gradients = {"w": jnp.array([3.0, 3.0]) * hvd.rank()}  # 0 and 3
        updates, state = optimizer.update(gradients, optimizer.init(params), params)
        optax.apply_updates(params, updates)  # -> {"w": [0.25, 0.25]}
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "horoplug.jax.DistributedOptimizer needs optax: pip install optax"
        ) from error
    if not isinstance(optimizer, optax.GradientTransformation):
        text = not_an_optimizer("an optimizer of optax", optimizer)
        raise TypeError(f"{text}; {_remedy(optimizer)}")
    options = Options(
        name="DistributedOptimizer",
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        average_aggregated_gradients=average_aggregated_gradients,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        groups=groups,
    )
    reduction = Reduction(options)
    inner = optax.with_extra_args_support(optimizer)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updated: tuple[Any, Any] = inner.update(reduction.reduce(gradients), state, params, **extra)
        return updated

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


def _remedy(value: Any) -> str:
    if type(value).__name__ == "MultiSteps":
        return (
            "wrap the optimizer inside of it, MultiSteps(DistributedOptimizer(optimizer), k), or pass "
            "backward_passes_per_step=k"
        )
    return "pass one such as optax.adam(1e-3)"


def distributed_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    compression: AnyCompressor = Compression.none,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    groups: Groups = None,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """``jax.value_and_grad`` whose gradients are reduced over the ranks. The value is not reduced.

    ``fun``, ``argnums``, ``has_aux`` and ``options``: those of ``jax.value_and_grad``. The other arguments are those of
    :func:`DistributedOptimizer`.

    Raises ValueError for invalid arguments.

    Example, on two ranks:

        def loss(w):
            return jnp.sum(w) * 3.0 * hvd.rank()

        value, gradient = hvd.distributed_value_and_grad(loss)(jnp.array([1.0, 1.0]))
        value  # -> 0.0 on rank 0, 6.0 on rank 1
        gradient  # -> [1.5, 1.5]
    """
    local = jax.value_and_grad(fun, argnums, has_aux, **options)
    reduction = Reduction(
        Options(
            name="distributed_value_and_grad",
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
            groups=groups,
        )
    )

    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value, gradients = local(*args, **kwargs)
        return value, reduction.reduce(gradients)

    return value_and_grad


def distributed_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """``jax.grad`` whose gradients are reduced over the ranks (with ``has_aux``: ``(gradients, aux)``).

    ``options`` and the other arguments are those of :func:`distributed_value_and_grad`. Raises its exceptions.

    Example, on two ranks:

        def loss(w):
            return jnp.sum(w) * 3.0 * hvd.rank()

        hvd.distributed_grad(loss)(jnp.array([1.0, 1.0]))  # -> [1.5, 1.5]
    """
    both = distributed_value_and_grad(fun, argnums, has_aux, **options)

    def grad(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return grad
