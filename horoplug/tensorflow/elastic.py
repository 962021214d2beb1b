"""Training that continues after a failure.

@hvd.elastic.run
def train(state):
    while state.epoch < 10:
        for batch in batches:
            train_step(batch)
        state.epoch += 1
        state.commit()

train(hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0))

In a job of ``horovodrun --min-np``, processes that fail are replaced: see :mod:`horoplug.common.elastic`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horoplug.common.basics import rank
from horoplug.common.elastic import (
    ObjectState,
    check_alike,
    initialize_again,
    run_fn,
    variable_parts,
)
from horoplug.common.keras_building import build_as_on_root
from horoplug.tensorflow.functions import broadcast_object, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is its state (a :class:`TensorFlowState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails because the job is broken, all ranks restore the last ``state.commit()``, initialise again,
    receive the state of rank 0, and call the function again. The function must contain all collective operations of the
    training, and resume from the progress in the state. Other errors are raised to the caller, and so is the tenth
    failure in a row without a commit."""
    return run_fn(func, initialize_again, is_failure)


def is_failure(error: BaseException) -> bool:
    """Whether an exception is the failure of a horoplug operation on all ranks."""
    return isinstance(error, tf.errors.OpError) and "a Horovod operation has failed" in str(error)


class TensorFlowState(ObjectState):
    """The state of a training run: variables, and Python objects as attributes (``epoch=0``).

    ``variables``: in a graph of TensorFlow 1, by default all variables of the graph, with their values in ``session``
    (by default the current session). The graph must not be finalized. Raises ValueError without variables in eager
    mode."""

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if not variables and not tf.executing_eagerly():
            variables = tf.compat.v1.global_variables()
        if variables is None:
            raise ValueError("TensorFlowState needs variables=, a list of variables.")
        self.variables = list(variables)
        self.session = None
        if not tf.executing_eagerly():
            self.session = session or tf.compat.v1.get_default_session()
            if self.session is None:
                raise ValueError("TensorFlowState needs session= in a graph of TensorFlow 1.")
            self._new_values = [
                tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape) for v in self.variables
            ]
            self._assigned = [
                v.assign(value) for v, value in zip(self.variables, self._new_values, strict=True)
            ]
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_variables()

    def save(self) -> None:
        self._save_variables()
        super().save()

    def restore(self) -> None:
        self._assign(self._saved_values)
        super().restore()

    def sync(self) -> None:
        check_alike(variable_parts(self._all_variables()))
        if self.session is None:
            broadcast_variables(self._all_variables(), root_rank=0)
        else:
            self._assign(broadcast_object(self.session.run(self.variables)))
        self._save_variables()  # restored after a failure before the first commit
        super().sync()

    def _all_variables(self) -> list[Any]:
        return self.variables

    def _save_variables(self) -> None:
        if self.session is None:
            self._saved = self._all_variables()
            self._saved_values = [tf.convert_to_tensor(v).numpy() for v in self._saved]
        else:
            self._saved_values = self.session.run(self.variables)

    def _assign(self, values: Sequence[Any]) -> None:
        if self.session is None:
            for variable, value in zip(self._saved, values, strict=True):
                variable.assign(value)
        else:
            feeds = dict(zip(self._new_values, values, strict=True))
            self.session.run(self._assigned, feeds)


class TensorFlowKerasState(TensorFlowState):
    """The state of a training run with a model of ``tf.keras`` and its optimizer (by default the model's own).

    ``backend`` is accepted for compatibility with Horovod and has no effect. Variables that the model or the optimizer
    creates later are part of the state from the next commit on."""

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        self.model = model
        chosen: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.optimizer = chosen
        if model.built and not getattr(chosen, "built", True):
            chosen.build(model.trainable_variables)
        super().__init__(self._all_variables(), **kwargs)

    def sync(self) -> None:
        build_as_on_root(self.model, self.optimizer, self._bcast_object)
        super().sync()

    def _all_variables(self) -> list[Any]:
        of_optimizer = getattr(self.optimizer, "variables", ())
        if callable(of_optimizer):  # a method in Keras 2
            of_optimizer = of_optimizer()
        of_model = self.model.variables if self.model.built else ()
        return [*of_model, *of_optimizer]
