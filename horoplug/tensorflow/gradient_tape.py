"""A ``tf.GradientTape`` whose gradients are reduced over the ranks."""

from typing import Any, TypeVar

import tensorflow as tf

from horoplug.common.compression import AnyCompressor
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.common.reduction_options import ReductionOptions, weights_of
from horoplug.tensorflow.compression import Compression
from horoplug.tensorflow.library import do_not_convert
from horoplug.tensorflow.reduction import Reduction

Tape = TypeVar("Tape", bound=tf.GradientTape)


class _DistributedTape:
    """The base class that is added to the class of the user's tape, see :func:`DistributedGradientTape`."""

    _reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradient of a source (a variable) from the reduction."""
        self._reduction.register_local(source)

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
        **options: Any,
    ) -> Any:
        """``tf.GradientTape.gradient``, reduced over the ranks. ``use_generic_names`` is accepted for compatibility
        with Horovod and has no effect: the names of operations do not depend on those of variables. If it is no bool,
        it is TensorFlow's argument in this position, ``unconnected_gradients``."""
        if not isinstance(use_generic_names, bool):
            options["unconnected_gradients"] = use_generic_names
        gradients = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]
        flat_sources = tf.nest.flatten(sources)
        flat = list(tf.nest.flatten(gradients, expand_composites=False))
        return tf.nest.pack_sequence_as(gradients, self._reduction.reduce(flat, flat_sources))

    @do_not_convert
    def get_local_and_global_gradients(self, gradients: Any, sources: Any) -> tuple[Any, Any]:
        """Reduce `gradients`. Returns the gradients of the local sources and those of the other sources: two structures
        like `gradients` (a list, or a single tensor), each with None where the other one has a gradient."""
        flat_sources = tf.nest.flatten(sources)
        flat = list(tf.nest.flatten(gradients, expand_composites=False))
        reduced = self._reduction.reduce(flat, flat_sources)
        is_local = [self._reduction.is_local(source) for source in flat_sources]
        local = [g if here else None for g, here in zip(reduced, is_local, strict=True)]
        others = [None if here else g for g, here in zip(reduced, is_local, strict=True)]
        return tf.nest.pack_sequence_as(gradients, local), tf.nest.pack_sequence_as(
            gradients, others
        )


def DistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Tape:
    """A tape that replaces `gradtape`, with a class derived from its class, whose ``gradient`` reduces over the ranks.

    ``device_dense``, ``device_sparse``: the device on which TensorFlow places the operations.
    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of your own.
    ``sparse_as_dense``: convert ``tf.IndexedSlices`` to dense tensors first.
    ``op``: the reduction: Average, Sum, Adasum, Min, Max or Product.
    ``gradient_predivide_factor``: with Average, divide by this factor before the sum, and by size / factor after it.
    ``groups``: gradients that are reduced in one operation: the number of groups, or lists of variables (a variable in
        no list is reduced alone). (num_groups is its older name.)
    ``process_set``: the ranks over which gradients are reduced; other ranks use their own gradients.
    ``scale_local_gradients``: divide the gradients of local sources (``register_local_source``) by the number of ranks,
        like the average.

    Raises ValueError for invalid ``groups``, and for gradient_predivide_factor with another op than Average.

    Example, on two ranks:

        w = tf.Variable([1.0, 1.0])
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(w * 3.0 * hvd.rank())  # the gradients are 0 and 3
        tape.gradient(loss, [w])  # -> [[1.5, 1.5]]
    """
    return PartialDistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
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
    are local sources.

    Returns the tape, whose class derives from that of ``gradtape``. The other arguments are those of
    :func:`DistributedGradientTape`. Raises its exceptions.

    Example, on two ranks:

        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        layer.build((None, 2))
        with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer) as tape:
            loss = tf.reduce_sum(layer(tf.ones((1, 2)) * 4.0 * (1 + hvd.rank())))
        tape.gradient(loss, layer.trainable_weights)  # -> [[[2.0], [2.0]]] on rank 0, [[[4.0], [4.0]]] on rank 1
    """
    # The same name for both functions: only some ranks may have local layers.
    options = ReductionOptions(
        name="DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"expected a tf.GradientTape, got {type(gradtape).__name__}")
    kind = type(gradtape)
    made: Any = object.__new__(
        type(kind.__name__, (_DistributedTape, kind), {"__module__": kind.__module__})
    )
    made.__dict__.update(vars(gradtape))
    made._reduction = Reduction(options)
    for variable in weights_of(local_layers):
        made.register_local_source(variable)
    distributed: Tape = made
    return distributed
