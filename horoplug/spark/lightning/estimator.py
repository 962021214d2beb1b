"""``TorchEstimator`` and ``TorchModel`` for Lightning."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, ClassVar

import torch

try:
    import lightning as _lightning  # noqa: F401
except ImportError as error:
    raise ImportError(
        "horoplug.spark.lightning needs Lightning 2: pip install 'horoplug[lightning]'"
    ) from error

from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.common.estimator import HorovodEstimator
from horoplug.spark.common.params import Spec, parameters
from horoplug.spark.common.work import Outcome, Work
from horoplug.spark.lightning.package import package_of
from horoplug.spark.lightning.plain import PlainModule
from horoplug.spark.torch.estimator import ModuleEstimator
from horoplug.spark.torch.estimator import TorchModel as _TorchModel
from horoplug.spark.torch.losses import Loss, Metrics


@parameters(
    Spec("logger", None, "a logger of Lightning"),
    Spec("log_every_n_steps", 50, "batches between two records of a logger", "positive"),
    Spec("profiler", None, "a profiler of Lightning, or its name"),
    Spec("terminate_on_nan", False, "whether a loss that is not finite ends the training", "flag"),
    Spec("trainer_args", None, "further arguments of the Trainer"),
    Spec("checkpoint_callback", None, "one more callback"),
    Spec("num_gpus", None, "accepted for compatibility with Horovod; no effect"),
    Spec("loader_num_epochs", None, "accepted for compatibility with Horovod; no effect"),
    Spec("debug_data_loader", False, "accepted for compatibility with Horovod; no effect", "flag"),
    Spec("train_async_data_loader_queue_size", None, "accepted for compatibility; no effect"),
    Spec("val_async_data_loader_queue_size", None, "accepted for compatibility; no effect"),
)
class TorchEstimator(ModuleEstimator):
    """Trains a ``LightningModule`` of the package lightning or pytorch_lightning (version 2), whose ``training_step``
    and ``validation_step`` get a dictionary with a tensor for each column, including those of labels and weights. A
    column that is a feature and a label has the feature's shape.

    ``forward`` gets one tensor for each feature column: ``transform`` calls it. Learning rates are multiplied by the
    number of ranks, as by Horovod's strategy for Lightning. Metrics are what the module logs, best with
    ``sync_dist=True``; the history has their values at the end of each epoch. A plain ``torch.nn.Module`` with
    ``optimizer`` and ``loss`` is trained as by :class:`horoplug.spark.torch.TorchEstimator`, with Lightning's
    callbacks."""

    framework = "lightning"
    suffix = ".ckpt"
    objects: ClassVar = (*HorovodEstimator.objects, "logger", "profiler", "trainer_args")

    def _check(self) -> None:
        super()._check()
        model = self.value("model")
        if not isinstance(model, torch.nn.Module):
            raise EstimatorError(f"model={model!r}: must be a LightningModule")
        if package_of(model) is None:
            missing = [name for name in ("optimizer", "loss") if self.value(name) is None]
            if missing:
                raise EstimatorError(
                    f"model: {type(model).__name__} is not a LightningModule, and so needs {missing[0]}"
                )
            self._module()

    def _module(self) -> Any:
        model = self.value("model")
        if package_of(model) is not None:
            return model
        labels, weight = self.value("label_cols"), self.value("sample_weight_col")
        return PlainModule(
            model,
            self.value("optimizer"),
            Loss(self.value("loss"), self.value("loss_weights"), len(labels), bool(weight)),
            Metrics(self.value("metrics"), labels),
            self.value("feature_cols"),
            labels,
            weight,
            self.value("input_shapes"),
            self.value("label_shapes"),
        )

    def _objects(self) -> dict[str, Any]:
        extra = self.value("checkpoint_callback")
        callbacks = [*(self.value("callbacks") or ()), *([extra] if extra is not None else ())]
        used = {"model": self._module(), "callbacks": callbacks}
        return {**super()._objects(), "optimizer": None, "loss": None, "metrics": None, **used}

    def _training(self) -> Callable[[Work], Outcome | None]:
        from horoplug.spark.lightning.remote import train

        return train

    def _fitted(self, outcome: Outcome, values: dict[str, Any]) -> TorchModel:
        state = torch.load(io.BytesIO(outcome.state), weights_only=True)
        model = copy.deepcopy(self.value("model"))
        if package_of(model) is None:
            state = {name.removeprefix("module."): value for name, value in state.items()}
        model.load_state_dict(state)
        return TorchModel(model=model, input_shapes=self.value("input_shapes"), **values)


class TorchModel(_TorchModel):
    """A trained module as a Spark ML model. ``getModel()`` is the module."""
