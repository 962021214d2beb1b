"""Helpers of Horovod's TensorFlow module, which some programs use."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Adasum, check_ranks, resolve
from horoplug.common.reduction_options import ReductionOptions
from horoplug.tensorflow.reduction import Reduction

_cache = functools.cache


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow finds a GPU. The arguments are Horovod's and have no effect."""
    return bool(tf.config.list_physical_devices("GPU"))


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    return tf.function(f)


def vars_to_refs(vars: Any) -> Any:
    """A hashable reference to a variable, or a tuple of references for a list."""
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(each) for each in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The inverse of :func:`vars_to_refs`."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(each) for each in refs]
    return refs.deref()


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The reduction for ``op`` and the deprecated argument ``average``. Raises ValueError if both are given."""
    return resolve(op, average)


def check_num_rank_power_of_2(num_rank: int) -> None:
    """Raises NotImplementedError for a number of ranks that Adasum does not support."""
    check_ranks(Adasum, num_rank)


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: Groups,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """A function of gradients, and optionally their variables, that returns the reduced gradients."""
    options = ReductionOptions(
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
    )
    reduction = Reduction(options)

    def allreduce_grads(grads: Sequence[Any], vars: Sequence[Any] | None = None) -> list[Any]:
        return reduction.reduce(grads, [None] * len(grads) if vars is None else vars)

    return allreduce_grads


_SIGNATURE = inspect.signature(_make_allreduce_grads_fn)


@_cache
def _cached_allreduce_grads_fn(groups: Any, **options: Any) -> Any:
    groups = refs_to_vars(groups) if isinstance(groups, tuple) else groups
    made = _make_allreduce_grads_fn(groups=groups, **options)
    return _make_subgraph(made) if _executing_eagerly() else made


def _make_cached_allreduce_grads_fn(*args: Any, **options: Any) -> Callable[..., list[Any]]:
    """:func:`_make_allreduce_grads_fn` with a cache: equal arguments give the same function, which is a
    ``tf.function`` in eager mode."""
    given = _SIGNATURE.bind(*args, **options).arguments
    groups = given.pop("groups")
    groups = vars_to_refs(groups) if isinstance(groups, (list, tuple)) else groups
    cached: Callable[..., list[Any]] = _cached_allreduce_grads_fn(groups, **given)
    return cached
