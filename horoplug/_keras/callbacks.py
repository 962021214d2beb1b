"""What the callbacks do, apart from the class of Keras that they are derived from; see
:mod:`horoplug.keras.callbacks`."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from horoplug._keras.functions import broadcast_variables, optimizer_variables, weights, without
from horoplug.common.basics import size
from horoplug.common.reduce_ops import Average
from horoplug.numpy import allreduce


class Broadcast:
    """Body of ``BroadcastGlobalVariablesCallback``."""

    model: Any

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        self._local.append(var)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        # Not before the first batch, which may have created variables.
        if not self.broadcast_done:
            model = self.model
            broadcast_variables(without(weights(model), self._local), self.root_rank)
            self.broadcast_done = True


class MetricAverage:
    """Body of ``MetricAverageCallback``."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if not names:
            return
        values = np.array([float(logs[name]) for name in names])
        # With their names, which so appear in the error if the ranks have different ones.
        averages = allreduce(values, name=f"metrics.{','.join(names)}", op=Average)
        logs.update(zip(names, averages.tolist(), strict=True))


class LearningRateSchedule:
    """Body of ``LearningRateScheduleCallback``."""

    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__} needs initial_lr.")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier
        )

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__} does not know how many steps an epoch has: give it steps_per_epoch=."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = learning_rate(optimizer)
        after = self.initial_lr * self.multiplier(epoch)
        if after == before:
            return
        optimizer.learning_rate = after
        if self.momentum_correction and before:
            _scale_momentum(optimizer, after / before)


class LearningRateWarmup(LearningRateSchedule):
    """Body of ``LearningRateWarmupCallback``."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # One step on, so that an epoch ends at a round number.
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 + done * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {rate:g}.")


def learning_rate(optimizer: Any) -> float:
    """The learning rate that the next step takes."""
    rate = optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)


def _scale_momentum(optimizer: Any, factor: float) -> None:
    """Goyal et al., Accurate, Large Minibatch SGD (2017), section 3: past gradients are in the momentum with the
    learning rate of their time; scaling what has been gathered corrects it. (To scale the optimizer's ``momentum`` for
    one batch is the same, but a compiled step would not notice.)"""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "momentum", None):
        return
    slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    if slots is None:  # Keras 2's older optimizers
        slots = [v for v in optimizer_variables(optimizer) if "momentum" in getattr(v, "name", "")]
    for slot in slots:
        if slot is not None:
            slot.assign(slot * factor)


class BestModel:
    """Body of ``BestModelCheckpoint``."""

    filepath: Any

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(  # type: ignore[call-arg]
            filepath=f"best{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint does not know where to save: set its attribute filepath before fit."
            )
        super().on_train_begin(logs)  # type: ignore[misc]


def derive(callbacks: Iterable[type], library: Any) -> dict[str, type]:
    """Callbacks (a body and a class of Keras each) for another library with Keras' interface, by their names."""
    made = {}
    for kind in callbacks:
        body, base = kind.__bases__
        attributes = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        base = getattr(library.callbacks, base.__name__)
        made[kind.__name__] = type(kind.__name__, (body, base), attributes)
    return made
