"""Gradients of all ranks become one: what tapes and optimizers do with the gradients that they have computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import tensorflow as tf

from horoplug.common.grouping import Groups, check_groups, groups_of, split_places
from horoplug.common.process_sets import ProcessSet
from horoplug.common.reduce_ops import Average
from horoplug.tensorflow.library import as_written, in_any_order
from horoplug.tensorflow.mpi_ops import allreduce, grouped_allreduce
from horoplug.tensorflow.nodes import size_of
from horoplug.tensorflow.xla import compiling

# Bytes of gradients that a graph hands to the core at once. Fewer would cost an operation for each, more would keep
# the first ones waiting.
_BUNDLE: Final = 1 << 20


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced. The arguments are those of :func:`DistributedGradientTape`.

    Raises ValueError for a predivide factor with another op than Average, and for ``groups`` that are none."""

    name: str  # what the operations' names begin with, the same on every rank
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    op: int
    gradient_predivide_factor: float
    groups: Groups
    process_set: ProcessSet
    scale_local_gradients: bool = True
    ignore_name_scope: bool = False  # where the scopes of a graph have other names on other ranks
    _local: dict[int, Any] = field(
        default_factory=dict, init=False
    )  # sources by id, of which nobody else gets one

    def __post_init__(self) -> None:
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only.")
        check_groups(self.groups)

    @classmethod
    def of(cls, name: str, arguments: Mapping[str, Any]) -> "Reduction":
        """From the arguments of a user's call, by name; those that are none of a reduction's are left out."""
        known = [f.name for f in fields(cls) if f.init and f.name in arguments]
        chosen = {key: arguments[key] for key in known} | {"name": name}
        return cls(**chosen | {"groups": groups_of(arguments)})

    def leave_local(self, source: Any) -> None:
        """Leave the gradient of a source (a variable) to this rank alone."""
        self._local[id(source)] = source

    def is_local(self, source: Any) -> bool:
        """Whether :meth:`leave_local` was called for it."""
        return id(source) in self._local

    def local(self, gradient: Any) -> Any:
        """The gradient of a source that every rank has for itself: its share of the average, if it is to be scaled."""
        if gradient is None or not self.scale_local_gradients:
            return gradient
        return share(gradient, self.process_set)

    @as_written
    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """The reduced gradients in the order of ``sources``, which they belong to. What is None stays so; those of
        local sources are :meth:`local`.

        On ranks outside of the process set: the gradients as they are."""
        shared = [None if self.is_local(s) else g for g, s in zip(gradients, sources, strict=True)]
        reduced = self._reduce(shared, sources)
        for place, source in enumerate(sources):
            if self.is_local(source):
                reduced[place] = self.local(gradients[place])
        return reduced

    def _reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        reduced = list(gradients)
        if self.process_set.included() is False:
            return reduced
        if self.sparse_as_dense or compiling():
            reduced = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in reduced
            ]
        if compiling():
            # The shape of what is computed may not be known when the function is traced.
            reduced = [
                g if g is None else tf.ensure_shape(g, source.shape)
                for g, source in zip(reduced, sources, strict=True)
            ]
        for group in self._groups(reduced, sources):
            # By place: variables of the same model may have other names on other ranks.
            name = f"{self.name}.{len(reduced)}.{group[0]}"
            results = self._allreduce([reduced[place] for place in group], name)
            for place, result in zip(group, results, strict=True):
                reduced[place] = result
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
        """The places of gradients that travel together. Where only one operation at a time is under way, as in eager
        mode and in functions that XLA compiles, these are all that may."""
        sparse = [p for p, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        left_out = {p for p, g in enumerate(gradients) if g is None} | set(sparse)
        dense = [p for p in range(len(gradients)) if p not in left_out]
        groups: list[list[int]]
        if isinstance(self.groups, int):
            groups = split_places(dense, self.groups, ())
        elif self.groups is not None:
            listed = [[id(source) for source in group] for group in self.groups]
            groups = split_places(dense, listed, [id(source) for source in sources])
        elif tf.executing_eagerly() or compiling() or not in_any_order():
            groups = [dense]
        else:
            groups = _bundles(gradients, dense)
        return [group for group in groups if group] + [[place] for place in sparse]


def share(gradient: Any, process_set: ProcessSet) -> Any:
    """A gradient divided by the number of ranks."""
    factor = 1.0 / tf.cast(size_of(process_set.process_set_id or 0), gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _bundles(gradients: Sequence[Any], places: Sequence[int]) -> list[list[int]]:
    """Neighbours, as many as make up a bundle. What is computed first comes from the end of the model."""
    bundles: list[list[int]] = [[]]
    filled = 0
    for place in reversed(places):
        bundles[-1].append(place)
        filled += gradients[place].dtype.size * (gradients[place].shape.num_elements() or _BUNDLE)
        if filled >= _BUNDLE:
            bundles.append([])
            filled = 0
    return bundles
