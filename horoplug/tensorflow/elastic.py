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
    Parameters,
    Result,
    check_alike,
    initialize_again,
    run_fn,
    variable_parts,
)
from horoplug.common.keras_building import build_as_on_root, build_optimizer
from horoplug.common.keras_seeds import keep_seeds
from horoplug.common.keras_updates import VariablesState, optimizer_variables
from horoplug.common.object_state import keep_in_place
from horoplug.common.status import says_operation_failed
from horoplug.tensorflow.functions import broadcast_object, broadcast_variables
from horoplug.tensorflow.progress import TensorFlowProgress

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

keep_in_place(
    tf.random.Generator,
    lambda generator: generator.state.numpy(),
    lambda generator, state: generator.state.assign(state),
)


def run(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a training function (``func``) whose first argument is its state (a :class:`TensorFlowState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails because the job is broken, all ranks restore the last ``state.commit()``, initialise again,
    receive the state of rank 0, and call the function again. The function must contain all collective operations of the
    training, and resume from the progress in the state. Other errors are raised to the caller, and so is the tenth
    failure in a row without a commit.

    Returns a function with the same arguments and result, which raises ValueError if the state cannot be sent, and what
    ``func`` raises.

    Example, on two ranks:

        @hvd.elastic.run
        def train(state, steps):
            while state.step < steps:
                state.variables[0].assign_add(1.0)
                state.step += 1
                state.commit()
            return state.step

        train(hvd.elastic.TensorFlowState([tf.Variable(0.0)], step=0), 3)  # -> 3
    """
    return run_fn(func, initialize_again, is_failure)


def is_failure(error: BaseException) -> bool:
    """Whether an exception is the failure of a horoplug operation on all ranks."""
    return isinstance(error, tf.errors.OpError) and says_operation_failed(error)


class TensorFlowState(VariablesState):
    """The state of a training run: variables, and Python objects (``kwargs``) as attributes (``epoch=0``).

    ``variables``: in a graph of TensorFlow 1, by default all variables of the graph, with their values in ``session``
    (by default the current session). The graph must not be finalized. Raises ValueError without variables in eager
    mode.

    ``rollback=False``: variables that ``optimizer``, an optimizer of Keras, updates, and its own variables, are not
    copied. They are part of the state. After a failure, processes keep them: an update begins only when all reductions
    of the step are done, also in a ``tf.function``. Processes that are behind, and new ones, take over the state of the
    one that has got furthest; then all compare a checksum of the parameters. Create the state before the first step,
    change these variables by the optimizer only, and call ``commit()`` directly after each step: if an operation fails
    between the two, that step's batch is repeated. Other variables and objects return to the last commit. Raises
    ValueError without such an optimizer, for one that accumulates gradients, and in a graph of TensorFlow 1.

    Example, on two ranks:

        variable = tf.Variable([1.0])
        state = hvd.elastic.TensorFlowState([variable], step=0)
        variable.assign([5.0])
        state.step = 1
        state.commit()
        variable.assign([7.0])
        state.restore()
        state.step, variable  # -> (1, [5.0])
    """

    def __init__(
        self,
        variables: Sequence[Any] | None = None,
        session: Any = None,
        *,
        optimizer: Any = None,
        rollback: bool = True,
        **kwargs: Any,
    ) -> None:
        if not variables and not tf.executing_eagerly():
            variables = tf.compat.v1.global_variables()
        if variables is None:
            raise ValueError("TensorFlowState needs variables=, a list of variables")
        self.variables = list(variables)
        self.session: Any = None
        if rollback and optimizer is not None:
            kwargs["optimizer"] = optimizer  # an attribute like any other
        elif not rollback:
            if optimizer is None:
                raise ValueError(
                    "rollback=False needs optimizer=, the optimizer of Keras that updates the variables; use "
                    "rollback=True if the program updates them itself"
                )
            self.optimizer = optimizer
            self._progress = TensorFlowProgress(optimizer)
        if not tf.executing_eagerly():
            self.session = session or tf.compat.v1.get_default_session()
            if self.session is None:
                raise ValueError("TensorFlowState needs session= in a graph of TensorFlow 1")
            self._new_values = [
                tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape) for v in self.variables
            ]
            self._assigned = [
                v.assign(value) for v, value in zip(self.variables, self._new_values, strict=True)
            ]
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_variables()

    def sync(self) -> None:
        check_alike(variable_parts(self._all_variables()))
        if self._progress is not None:
            self._sync_from_furthest(self._progress)
        else:
            self._receive(0)

    def _receive(self, root_rank: int) -> None:
        if self.session is None:
            broadcast_variables(self._all_variables(), root_rank)
        else:
            self._assign_in_session(broadcast_object(self.session.run(self.variables)))
        self._save_variables()  # restored after a failure before the first commit
        self._sync_from(root_rank)

    @staticmethod
    def _read(variable: Any) -> Any:
        return tf.convert_to_tensor(variable).numpy()

    def _trained(self) -> list[Any]:
        return [variable for variable in self._all_variables() if variable.trainable]

    def _all_variables(self) -> list[Any]:
        if self._progress is None:
            return self.variables
        known = {id(variable) for variable in self.variables}
        own = optimizer_variables(self.optimizer)
        return [*self.variables, *(variable for variable in own if id(variable) not in known)]

    def _save_variables(self) -> None:
        if self.session is None:
            super()._save_variables()
        else:
            self._saved_values = self.session.run(self.variables)

    def _restore_variables(self) -> None:
        if self.session is None:
            super()._restore_variables()
        else:
            self._assign_in_session(self._saved_values)

    def _assign_in_session(self, values: Sequence[Any]) -> None:
        feeds = dict(zip(self._new_values, values, strict=True))
        self.session.run(self._assigned, feeds)


class TensorFlowKerasState(TensorFlowState):
    """The state of a training run with a model of ``tf.keras`` and its optimizer (by default the model's own).

    ``kwargs``: further attributes. ``backend`` is accepted for compatibility with Horovod and has no effect. Variables
    that the model or the optimizer creates later are part of the state from the next commit on. ``rollback``: see
    :class:`TensorFlowState`.

    Example, on two ranks:

        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
        model.build((None, 1))
        model.compile(tf.keras.optimizers.SGD(0.1), loss="mse")
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
        model.layers[0].kernel.assign([[5.0]])
        state.epoch = 1
        state.restore()  # nothing was committed
        state.epoch, model.layers[0].kernel  # -> (0, [[1.0]])
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
        chosen: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.optimizer = chosen
        build_optimizer(model, chosen)
        keep_seeds(tf.keras)
        given = {} if rollback else {"optimizer": chosen}
        super().__init__(self._all_variables(), rollback=rollback, **given, **kwargs)

    def sync(self) -> None:
        build_as_on_root(self.model, self.optimizer, self._bcast_object)
        super().sync()

    def _all_variables(self) -> list[Any]:
        of_model = self.model.variables if self.model.built else ()
        return [*of_model, *optimizer_variables(self.optimizer)]
