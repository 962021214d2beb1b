"""Training that continues after a failure.

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, epochs):
        for data, label in batches:
            ...
            trainer.step(batch_size)
        state.commit()

train(hvd.elastic.MXNetState(params=net.collect_params(), trainer=trainer, epoch=0))

In a job of ``horovodrun --min-np``, processes that fail are replaced: see :mod:`horoplug.common.elastic`.
"""

import pickle
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np

from horoplug.common.basics import rank
from horoplug.common.elastic import (
    ObjectState,
    Parameters,
    Result,
    check_alike,
    initialize_again,
    run_fn,
)
from horoplug.common.objects import broadcast_object
from horoplug.mxnet.parameters import broadcast_parameters

__all__ = ["MXNetState", "run"]


def run(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorator of a training function (``func``) whose first argument is its state (an :class:`MXNetState`, or any
    :class:`horoplug.common.elastic.State`).

    When an operation fails because the job is broken, all ranks restore the last ``state.commit()``, initialise again,
    receive the state of rank 0, and call the function again. The function must contain all collective operations of the
    training, and resume from the progress in the state. Other errors are raised to the caller, and so is the tenth
    failure in a row without a commit.

    Returns a function with the same arguments and result, which raises ValueError if the state cannot be sent.

    Example, on two ranks:

        @hvd.elastic.run
        def train(state, epochs):
            while state.epoch < epochs:
                state.params["w"][:] += 1.0
                state.epoch += 1
                state.commit()
            return state.params["w"]

        train(hvd.elastic.MXNetState(params={"w": mx.nd.array([0.0])}, epoch=0), 3)  # -> [3.0]
    """
    return run_fn(func, initialize_again)


class MXNetState(ObjectState):
    """The state of a training run: ``MXNetState(params=net.collect_params(), trainer=trainer, epoch=0)``.

    ``params``: Gluon's parameters or a dict of NDArrays, which change in place. ``trainer``: a trainer of Gluon, whose
    optimizer's state is a part of this state. Each further argument (``kwargs``) becomes an attribute, as in
    :class:`ObjectState`.

    Example, on two ranks:

        w = mx.nd.array([1.0])
        state = hvd.elastic.MXNetState(params={"w": w}, epoch=0)
        w[:] = 5.0
        state.epoch = 1
        state.commit()
        w[:] = 7.0
        state.restore()
        state.epoch, w  # -> (1, [5.0])
    """

    def __init__(self, params: Any = None, trainer: Any = None, **kwargs: Any) -> None:
        self.params = {} if params is None else params
        self.trainer = trainer
        self._saved: dict[str, np.ndarray] = {}
        self._saved_optimizer = b""
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_arrays()

    def save(self) -> None:
        self._save_arrays()
        super().save()

    def restore(self) -> None:
        for key, value in self._saved.items():
            _array(self.params[key])[:] = mx.nd.array(value, dtype=value.dtype)
        self._load_optimizer(self._saved_optimizer)
        super().restore()

    def sync(self) -> None:
        # By their order: MXNet's names of parameters may contain how many networks the process has made.
        arrays = {f"{i:06}": _array(each) for i, each in enumerate(self.params.values())}
        check_alike({key: f"{np.dtype(a.dtype)} {list(a.shape)}" for key, a in arrays.items()})
        broadcast_parameters(arrays, root_rank=0, prefix="elastic.")
        self._load_optimizer(broadcast_object(self._optimizer_state(), name="elastic.optimizer"))
        super().sync()
        self.save()

    def _save_arrays(self) -> None:
        self._saved = {key: _array(each).asnumpy() for key, each in self.params.items()}
        self._saved_optimizer = self._optimizer_state()

    def _optimizer_state(self) -> bytes:
        if self.trainer is None:
            return b""
        (updater,) = self.trainer._updaters
        optimizer = updater.optimizer
        counts = optimizer._index_update_count, optimizer.num_update
        return pickle.dumps((updater.get_states(dump_optimizer=False), counts))

    def _load_optimizer(self, state: bytes) -> None:
        if not state:
            return
        (updater,) = self.trainer._updaters
        states, (counts, last) = pickle.loads(state)
        updater.set_states(states)
        optimizer = updater.optimizer
        optimizer._index_update_count.clear()
        optimizer._index_update_count.update(counts)
        optimizer.num_update = last


def _array(value: Any) -> Any:
    return value.data() if isinstance(value, mx.gluon.parameter.Parameter) else value
