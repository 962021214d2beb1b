"""Elastic training with Keras: the state of a model and its optimizer, and mixins of callbacks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from horoplug._keras import backends
from horoplug._keras.functions import broadcast_variables, read, weights
from horoplug.common.basics import rank
from horoplug.common.elastic import (
    Parameters,
    Result,
    check_alike,
    initialize_again,
    run_fn,
    variable_parts,
)
from horoplug.common.keras_building import build_as_on_root, build_optimizer
from horoplug.common.keras_updates import VariablesState, optimizer_variables
from horoplug.common.objects import broadcast_object


class KerasState(VariablesState):
    """The state of a training run: ``KerasState(model, optimizer, batch=0, epoch=0)``.

    ``optimizer``: by default the model's. ``backend`` is accepted for compatibility with Horovod and has no effect.
    Each other argument (``kwargs``) becomes an attribute, see :class:`horoplug.common.elastic.ObjectState`. The model
        should be
    built: variables that it creates later are not restored after a failure before the next ``commit``.

    ``rollback=False``: variables that the optimizer updates, and its own variables, are not copied. After a failure,
    processes keep them: an update begins only when all reductions of the step are done, also in a function of
    TensorFlow. Processes that are behind, and new ones, take over the state of the one that has got furthest; then all
    compare a checksum of the parameters. Create the state before the first step, change these variables by the
    optimizer only, and call ``commit()`` directly after each step (``CommitStateCallback(state)``): if an operation
    fails between the two, that step's batch is repeated. Other variables and objects return to the last commit. Raises
    ValueError on the JAX backend, for an optimizer that accumulates gradients, and without an optimizer.

    Example, on two ranks:

        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        x = y = np.ones((2, 1))
        state = hvd.elastic.KerasState(model, epoch=0)
        model.layers[0].kernel.assign([[5.0]])
        state.epoch = 1
        state.commit()
        model.layers[0].kernel.assign([[7.0]])
        state.restore()
        state.epoch, model.layers[0].kernel  # -> (1, [[5.0]])
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        *,
        rollback: bool = True,
        **kwargs: Any,
    ) -> None:
        self.model = model
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        self.optimizer = optimizer
        build_optimizer(model, self.optimizer)
        if not rollback:
            self._progress = _backend(optimizer).Progress(optimizer)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_variables()

    _read = staticmethod(read)

    def _all_variables(self) -> list[Any]:
        return [*self.model.variables, *optimizer_variables(self.optimizer)]

    def _trained(self) -> list[Any]:
        return list(self.model.trainable_variables)

    def _save_variables(self) -> None:
        sync_jax(self.model)
        super()._save_variables()

    def sync(self) -> None:
        sync_jax(self.model)
        build_as_on_root(self.model, self.optimizer, self._bcast_object)
        check_alike(variable_parts(self.model.variables))
        if self._progress is not None:
            self._sync_from_furthest(self._progress)
            return
        self._receive(0)

    def _receive(self, root_rank: int) -> None:
        broadcast_variables(weights(self.model, self.optimizer), root_rank)
        self._save_variables()  # restored after a failure before the first commit
        self._sync_from(root_rank)


def _backend(optimizer: Any) -> Any:
    """The module of the backend of an optimizer."""
    if not hasattr(optimizer, "stateless_apply"):  # Keras 2
        return backends.load("tensorflow")
    # Not an import statement, because only callers that need Keras may import it.
    return backends.load(importlib.import_module("keras").backend.backend())


def sync_jax(model: Any) -> None:
    """Copy the values of the running ``fit`` to the variables. On the JAX backend, ``fit`` keeps the values elsewhere
    while it runs."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def run(
    func: Callable[Parameters, Result],
    failure: Callable[[BaseException], bool],
    reset: Callable[[], None] | None = None,
) -> Callable[Parameters, Result]:
    """:func:`horoplug.common.elastic.run_fn` for a framework that raises its own exceptions when the job is broken.

    ``failure``: whether an exception is one of these. ``reset``: called after the ranks have been initialised again."""

    def reinitialise() -> None:
        initialize_again()
        if reset is not None:
            reset()

    return run_fn(func, reinitialise, failure)


class Commit:
    """Mixin of ``CommitStateCallback``."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining <= 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatch:
    """Mixin of ``UpdateBatchStateCallback``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpoch:
    """Mixin of ``UpdateEpochStateCallback``."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._offset: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # The caller may have passed initial_epoch=state.epoch to fit, or reduced the number of epochs.
        if self._offset is None:
            self._offset = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._offset is not None
        self.state.epoch = self._offset + epoch + 1
