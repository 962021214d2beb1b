"""``DistributedOptimizer`` for Keras 3, and models that are saved with it."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from horoplug._keras.backends import load as load_backend
from horoplug._keras.models import load_model as load_with
from horoplug._keras.optimizer import Optimizer, make
from horoplug.common.compression import AnyCompressor, CompressionOptions
from horoplug.common.grouping import Groups
from horoplug.common.process_sets import ProcessSet, global_process_set
from horoplug.common.reduce_ops import Average
from horoplug.common.reduction_options import ReductionOptions

Compression: type[CompressionOptions] = load_backend(keras.backend.backend()).Compression


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Optimizer:
    """Make a Keras optimizer reduce its gradients over the ranks. Returns the optimizer itself: its variables, learning
    rate and schedules do not change, and a saved model contains the original optimizer.

    Gradients are reduced before clipping, weight decay and moving averages.

    ``name``: prefix of the operations' names, the same on all ranks.
    ``device_dense``, ``device_sparse``: the device on which TensorFlow places the operations.
    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, or a class of your own.
    ``sparse_as_dense``: convert sparse gradients to dense ones to reduce them, instead of gathering them.
    ``gradient_predivide_factor``: with Average, divide by this factor before the sum, and by size / factor after it.
    ``op``: the reduction: Average, Sum, Adasum, Min, Max, Product.
    ``groups``: gradients that are reduced in one operation: the number of groups, or lists of variables. (num_groups is
        its older name.)
    ``process_set``: the ranks over which gradients are reduced; other ranks use their own gradients.
    ``scale_local_gradients``: divide the gradients of variables that are not reduced (``optimizer.register_local_var``)
        by the number of ranks, like the average.
    ``backward_passes_per_step``: the number of batches whose gradients are added before they are reduced and applied.
        Keras accumulates them (gradient_accumulation_steps, which is saved with the optimizer).
    ``average_aggregated_gradients``: divide these sums by backward_passes_per_step.

    Raises ValueError for an object that is not an optimizer, for an optimizer that is distributed already, and for
    invalid arguments.

    Example, on two ranks:

        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25 * hvd.size()))
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(optimizer, loss=lambda y_true, y_pred: y_pred)
        x = np.array([[3.0, 3.0]], "float32") * hvd.rank()  # the gradients are 0 and 3
        history = model.fit(x, np.zeros((1, 1)), verbose=0)
        model.layers[0].kernel  # -> [[0.25], [0.25]]
    """
    options = ReductionOptions(
        name=name or "",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    return make(optimizer, options)


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """:func:`DistributedOptimizer` that does not reduce the gradients of the trainable variables of ``local_layers`` (a
    built layer or a list of built layers).

    Returns the optimizer itself. The other arguments are those of :func:`DistributedOptimizer`. Raises its exceptions.

    Example, on two ranks:

        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.layers.Input((2,)), layer])
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.25 * hvd.size()), local_layers=layer)
        model.compile(optimizer, loss=lambda y_true, y_pred: y_pred)
        x = np.array([[2.0, 2.0]], "float32") * (1 + hvd.rank())
        history = model.fit(x, np.zeros((1, 1)), verbose=0)  # subtracts 0.5 times the gradient of this rank / 2
        layer.kernel  # -> [[0.5], [0.5]] on rank 0, [[0.0], [0.0]] on rank 1
    """
    options = ReductionOptions(
        name=name or "",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    return make(optimizer, options, local_layers)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: AnyCompressor = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """``keras.models.load_model`` with a :func:`DistributedOptimizer` as the model's optimizer, to continue training.
    Models that were saved without horoplug can be loaded, too.

    ``custom_optimizers``: optimizer classes that are not part of Keras; ``custom_objects``: see Keras; ``options``:
    other arguments of :func:`DistributedOptimizer`. ``legacy_opts`` is accepted for compatibility with Horovod and has
    no effect.

    ``filepath``: of the saved model. ``compression``: of the gradients, as in :func:`DistributedOptimizer`. Returns the
    model. Raises the exceptions of Keras, and those of :func:`DistributedOptimizer`.

    Example, on two ranks:

        path = f"model-{hvd.rank()}.keras"
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.125), loss="mse")
        model.save(path)
        model = hvd.load_model(path, compression=hvd.Compression.fp16)
        float(model.optimizer.learning_rate)  # -> 0.125
    """
    options["compression"] = compression
    return load_with(
        keras, DistributedOptimizer, filepath, custom_optimizers, custom_objects, options
    )
