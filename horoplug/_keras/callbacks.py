"""The callbacks of :mod:`horoplug.keras.callbacks` as mixins, independent of the Keras class that they extend."""

from collections.abc import Callable, Iterable
from typing import Any

from horoplug._keras.functions import broadcast_variables, weights, without
from horoplug.common.arguments import converted, number
from horoplug.common.basics import size
from horoplug.common.keras_updates import optimizer_variables
from horoplug.numpy.metrics import MetricAverages


class Broadcast:
    """Mixin of ``BroadcastGlobalVariablesCallback``."""

    model: Any

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = list(local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.append(var)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        # After the first batch, which may have created variables.
        if not self.broadcast_done:
            model = self.model
            broadcast_variables(without(weights(model), self._local), self.root_rank)
            self.broadcast_done = True


class MetricAverage:
    """Mixin of ``MetricAverageCallback``."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._averages = MetricAverages("MetricAverageCallback")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs:
            logs.update(self._averages(logs))


class LearningRateSchedule:
    """Mixin of ``LearningRateScheduleCallback``."""

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
            raise ValueError(f"{type(self).__name__} needs initial_lr")
        if not callable(multiplier):
            converted(type(self).__name__, "multiplier", multiplier, number)
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
                f"{type(self).__name__} cannot determine the number of steps per epoch: pass steps_per_epoch="
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
    """Mixin of ``LearningRateWarmupCallback``."""

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
            # Count the step that begins now as done, so that the epoch is a whole number at its last step.
            done = (epoch + 1 / self.steps_per_epoch) / warmup_epochs
            return (1 + done * (size() - 1)) / size()

        converted(type(self).__name__, "warmup_epochs", warmup_epochs, number)
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
    """The learning rate of the next step."""
    rate = optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)


def _scale_momentum(optimizer: Any, factor: float) -> None:
    """Momentum correction, see Goyal et al., Accurate, Large Minibatch SGD (2017), section 3: the momentum contains
    past gradients multiplied by the learning rate of their step, and is scaled to the new rate. (Scaling the
    optimizer's ``momentum`` for one batch is equivalent, but has no effect in a compiled step.)"""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(optimizer, "momentum", None):
        return
    slots = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    if slots is None:  # the legacy optimizers of Keras 2
        slots = [v for v in optimizer_variables(optimizer) if "momentum" in getattr(v, "name", "")]
    for slot in slots:
        if slot is not None:
            slot.assign(slot * factor)


class BestModel:
    """Mixin of ``BestModelCheckpoint``."""

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
                "BestModelCheckpoint needs a path to save the model: set its attribute filepath before fit"
            )
        super().on_train_begin(logs)  # type: ignore[misc]


def derive(callbacks: Iterable[type], library: Any) -> dict[str, type]:
    """The callbacks (classes with a mixin and a Keras class as bases) for another library with Keras' interface, by
    name."""
    made = {}
    for kind in callbacks:
        mixin, base = kind.__bases__
        attributes = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        base = getattr(library.callbacks, base.__name__)
        made[kind.__name__] = type(kind.__name__, (mixin, base), attributes)
    return made
