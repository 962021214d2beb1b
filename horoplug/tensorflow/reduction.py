"""Reduction of gradients over the ranks, for tapes and optimizers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import tensorflow as tf

from horoplug.common.grouping import Groups, check_groups, groups_of, split_indices
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average
from horoplug.tensorflow.library import do_not_convert, runs_concurrently
from horoplug.tensorflow.mpi_ops import allreduce, grouped_allreduce
from horoplug.tensorflow.operations import size_of
from horoplug.tensorflow.xla import is_compiling

# Bytes of gradients that a graph reduces in one operation. Smaller buckets cost more operations; in larger ones the
# first gradients wait longer for the others.
_BUCKET_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. The arguments are those of :func:`DistributedGradientTape`.

    Raises ValueError for a predivide factor with another op than Average, and for invalid ``groups``."""

    name: str  # prefix of the operations' names, the same on every rank
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    op: int
    gradient_predivide_factor: float
    groups: Groups
    process_set: ProcessSet
    scale_local_gradients: bool = True
    ignore_name_scope: bool = False  # name scopes may differ between ranks
    # Local sources by id. The dictionary keeps the objects alive, so that their ids are not reused.
    _local: dict[int, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only.")
        check_groups(self.groups)

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "Reduction":
        """Make a reduction from the arguments of a user's call, by name. Other arguments than the fields of this class
        are ignored."""
        known = [f.name for f in fields(cls) if f.init and f.name in arguments]
        chosen = {key: arguments[key] for key in known} | {"name": name}
        return cls(**chosen | {"groups": groups_of(arguments)})

    def register_local(self, source: Any) -> None:
        """Exclude the gradient of a source (a variable) from the reduction."""
        self._local[id(source)] = source

    def is_local(self, source: Any) -> bool:
        """Whether :meth:`register_local` was called for a source."""
        return id(source) in self._local

    def local(self, gradient: Any) -> Any:
        """The gradient of a local source: divided by the number of ranks if ``scale_local_gradients`` is set."""
        if gradient is None or not self.scale_local_gradients:
            return gradient
        return scale_local(gradient, self.process_set)

    @do_not_convert
    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """The reduced gradients of ``sources``, in their order. Gradients that are None remain None; those of local
        sources are :meth:`local`.

        On ranks outside of the process set, the gradients of the other sources are returned unchanged."""
        shared = [None if self.is_local(s) else g for g, s in zip(gradients, sources, strict=True)]
        reduced = self._reduce(shared, sources)
        for i, source in enumerate(sources):
            if self.is_local(source):
                reduced[i] = self.local(gradients[i])
        return reduced

    def _reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        reduced = list(gradients)
        if self.process_set.included() is False:
            return reduced
        if self.sparse_as_dense or is_compiling():
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
            name = f"{self.name}.{len(reduced)}.{group[0]}"
            results = self._allreduce([reduced[i] for i in group], name)
            for i, result in zip(group, results, strict=True):
                reduced[i] = result
        return reduced

    def _allreduce(self, gradients: list[Any], name: str) -> list[Any]:
        options = {
            "device_dense": self.device_dense,
            "device_sparse": self.device_sparse,
            "compression": self.compression,
            "op": self.op,
            "process_set": self.process_set,
            "name": name,
            "ignore_name_scope": self.ignore_name_scope,
        }
        is_sparse = isinstance(gradients[0], tf.IndexedSlices)
        if self.gradient_predivide_factor != 1.0 and not is_sparse:
            options["prescale_factor"] = 1.0 / self.gradient_predivide_factor
            options["postscale_factor"] = self.gradient_predivide_factor
        if len(gradients) == 1:
            return [allreduce(gradients[0], **options)]
        return grouped_allreduce(gradients, **options)

    def _groups(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[list[int]]:
        """The indices of the gradients that each operation reduces. By default, one operation reduces all dense
        gradients where operations run one after the other, as in eager mode and in functions that XLA compiles."""
        sparse = [p for p, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        left_out = {p for p, g in enumerate(gradients) if g is None} | set(sparse)
        dense = [p for p in range(len(gradients)) if p not in left_out]
        groups: list[list[int]]
        if isinstance(self.groups, int):
            groups = split_indices(dense, self.groups, ())
        elif self.groups is not None:
            listed = [[id(source) for source in group] for group in self.groups]
            groups = split_indices(dense, listed, [id(source) for source in sources])
        elif tf.executing_eagerly() or is_compiling() or not runs_concurrently():
            groups = [dense]
        else:
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
