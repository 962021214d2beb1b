"""A ``tf.GradientTape`` whose gradients are those of all ranks together."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.library import as_written
from horoplug.tensorflow.reduction import Groups, Reduction

Tape = TypeVar("Tape", bound=tf.GradientTape)


class _Reducing:
    """What is added to the user's tape; see :func:`DistributedGradientTape`."""

    _reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a source (a variable) to this rank alone."""
        self._reduction.leave_local(source)

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, reduced over the ranks. ``use_generic_names`` is accepted for Horovod's
        sake: names do not depend on those of variables."""
        gradients = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        flat_sources = tf.nest.flatten(sources)
        flat = list(tf.nest.flatten(gradients, expand_composites=False))
        return tf.nest.pack_sequence_as(gradients, self._reduction.reduce(flat, flat_sources))

    @as_written
    def get_local_and_global_gradients(
        self, gradients: Sequence[Any], sources: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients that are not to be reduced, and the reduced ones, each with None where the other list has one."""
        whole = self._reduction.reduce(gradients, sources)
        is_local = [self._reduction.is_local(source) for source in sources]
        return (
            [g if local else None for g, local in zip(whole, is_local, strict=True)],
            [None if local else g for g, local in zip(whole, is_local, strict=True)],
        )


def _reducing(tape: Tape, arguments: Mapping[str, Any]) -> Tape:
    """A tape that takes the place of `tape`. ``arguments``: the user's, by name."""
    kind = type(tape)
    made: Any = object.__new__(
        type(kind.__name__, (_Reducing, kind), {"__module__": kind.__module__})
    )
    made.__dict__.update(vars(tape))
    # The same name for both kinds of tape: ranks may differ in their local layers.
    made._reduction = Reduction.of("DistributedGradientTape", arguments)
    return made


def DistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Tape:
    """A tape that takes the place of `gradtape`, of its class, whose ``gradient`` reduces over the ranks.

    ``sparse_as_dense``: make dense tensors of ``tf.IndexedSlices`` first. ``gradient_predivide_factor``: how much of
    the division by the number of ranks is done before the sum. ``groups``: gradients that travel together: how many
    groups, or lists of variables (those in no list travel alone); ``num_groups`` is its older name.
    ``scale_local_gradients``: divide the gradients of local sources (``register_local_source``) by the number of
    ranks, as the average does."""
    return _reducing(gradtape, locals())


def PartialDistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Tape:
    """:func:`DistributedGradientTape` in which the trainable variables of ``local_layers`` (a layer or a list of them)
    are local sources."""
    tape: Any = _reducing(gradtape, locals())
    layers = local_layers if isinstance(local_layers, (list, tuple)) else [local_layers]
    for layer in layers:
        for variable in layer.trainable_weights if layer is not None else ():
            tape.register_local_source(variable)
    return tape
