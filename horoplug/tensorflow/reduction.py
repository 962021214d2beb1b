"""Reduction of gradients over the ranks, for tapes and optimizers."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import tensorflow as tf

from horoplug.common.grouping import split_indices
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduction_options import ReductionOptions
from horoplug.tensorflow.library import do_not_convert, runs_concurrently
from horoplug.tensorflow.mpi_ops import allreduce, grouped_allreduce
from horoplug.tensorflow.operations import size_of
from horoplug.tensorflow.xla import is_compiling

# Bytes of gradients that a graph reduces in one operation. Smaller buckets cost more operations; in larger ones the
# first gradients wait longer for the others.
_BUCKET_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced."""

    options: ReductionOptions
    ignore_name_scope: bool = False  # name scopes may differ between ranks
    # Local sources by id. The dictionary keeps the objects alive, so that their ids are not reused.
    _local: dict[int, Any] = field(default_factory=dict, init=False)

    def register_local(self, source: Any) -> None:
        """Exclude the gradient of a source (a variable) from the reduction."""
        self._local[id(source)] = source

    def is_local(self, source: Any) -> bool:
        """Whether :meth:`register_local` was called for a source."""
        return id(source) in self._local

    def local(self, gradient: Any) -> Any:
        """The gradient of a local source: divided by the number of ranks if ``scale_local_gradients`` is set."""
        if gradient is None or not self.options.scale_local_gradients:
            return gradient
        return scale_local(gradient, self.options.process_set)

    @do_not_convert
    def reduce(
        self, gradients: Sequence[Any], sources: Sequence[Any], name: str | None = None
    ) -> list[Any]:
        """The reduced gradients of ``sources``, in their order. Gradients that are None remain None; those of local
        sources are :meth:`local`. ``name``: prefix of the operations' names, instead of that of the options.

        On ranks outside of the process set, the gradients of the other sources are returned unchanged."""
        shared = [None if self.is_local(s) else g for g, s in zip(gradients, sources, strict=True)]
        reduced = self._reduce(shared, sources, name or self.options.name)
        for i, source in enumerate(sources):
            if self.is_local(source):
                reduced[i] = self.local(gradients[i])
        return reduced

    def _reduce(self, gradients: Sequence[Any], sources: Sequence[Any], prefix: str) -> list[Any]:
        reduced = list(gradients)
        if self.options.process_set.included() is False:
            return reduced
        if self.options.sparse_as_dense or is_compiling():
            reduced = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in reduced
            ]
        if is_compiling():
            # The shape of a gradient may be unknown when the function is traced.
            reduced = [
                g if g is None else tf.ensure_shape(g, source.shape)
                for g, source in zip(reduced, sources, strict=True)
            ]
        for group in self._groups(reduced, sources):
            # By index: the names of variables may differ between ranks.
            name = f"{prefix}.{len(reduced)}.{group[0]}"
            results = self._allreduce([reduced[i] for i in group], name)
            for i, result in zip(group, results, strict=True):
                reduced[i] = result
        return reduced

    def _allreduce(self, gradients: list[Any], name: str) -> list[Any]:
        of, is_sparse = self.options, isinstance(gradients[0], tf.IndexedSlices)
        run = functools.partial(
            allreduce if len(gradients) == 1 else grouped_allreduce,
            device_dense=of.device_dense,
            device_sparse=of.device_sparse,
            compression=of.compression,
            op=of.op,
            process_set=of.process_set,
            name=name,
            ignore_name_scope=self.ignore_name_scope,
            prescale_factor=1.0 if is_sparse else of.prescale,
            postscale_factor=1.0 if is_sparse else of.postscale,
        )
        return [run(gradients[0])] if len(gradients) == 1 else run(gradients)

    def _groups(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[list[int]]:
        """The indices of the gradients that each operation reduces. By default, one operation reduces all dense
        gradients where operations run one after the other, as in eager mode and in functions that XLA compiles."""
        sparse = [p for p, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        left_out = {p for p, g in enumerate(gradients) if g is None} | set(sparse)
        dense = [p for p in range(len(gradients)) if p not in left_out]
        given, groups = self.options.groups, [dense]
        if isinstance(given, int):
            groups = split_indices(dense, given, ())
        elif given is not None:
            listed = [[id(source) for source in group] for group in given]
            groups = split_indices(dense, listed, [id(source) for source in sources])
        elif not (tf.executing_eagerly() or is_compiling()) and runs_concurrently():
            groups = _buckets(gradients, dense)
        return [group for group in groups if group] + [[i] for i in sparse]


def scale_local(gradient: Any, process_set: ProcessSet) -> Any:
    """A local gradient divided by the number of ranks, as if it were averaged with zeros on the other ranks."""
    factor = 1.0 / tf.cast(size_of(process_set.process_set_id or 0), gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _buckets(gradients: Sequence[Any], indices: Sequence[int]) -> list[list[int]]:
    """Divide gradients into buckets of consecutive ones, beginning with the last layers of the model, whose gradients
    are computed first."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for i in reversed(indices):
        buckets[-1].append(i)
        filled += gradients[i].dtype.size * (gradients[i].shape.num_elements() or _BUCKET_BYTES)
        if filled >= _BUCKET_BYTES:
            buckets.append([])
            filled = 0
    return buckets
