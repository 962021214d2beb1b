"""``TorchEstimator`` and ``TorchModel``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch

from horoplug.spark.common.columns import Metadata, check_shapes
from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.common.estimator import HorovodEstimator, HorovodModel
from horoplug.spark.common.params import Spec, parameters
from horoplug.spark.common.predicting import Predict
from horoplug.spark.common.work import Outcome, Work, pickled
from horoplug.spark.torch.losses import Loss
from horoplug.spark.torch.tensors import load_predict

_INPUT_SHAPES: Final = Spec(
    "input_shapes", None, "a shape for each feature column, whose first number is -1", "list"
)


@parameters(_INPUT_SHAPES)
class ModuleEstimator(HorovodEstimator):
    """What the estimators of modules of PyTorch share."""

    def _check_columns(self, metadata: Metadata) -> None:
        super()._check_columns(metadata)
        features = [metadata.column(name) for name in self.value("feature_cols")]
        check_shapes(features, self.value("input_shapes"), "input_shapes")


@parameters(Spec("loss_constructors", None, "functions that make the losses, in place of loss"))
class TorchEstimator(ModuleEstimator):
    """Trains a ``torch.nn.Module``, which gets one tensor for each feature column, and returns one for each label
    column (a tuple or list if there are several).

    The optimizer must have been made with the model's parameters. Floating-point columns get the dtype of the model's
    parameters, whole numbers become int64. A label gets the shape and dtype of its output if it has as many elements.
    A loss is called with (output, label); ``loss_weights`` are equal and add up to 1 if they are not given. Metrics are
    functions of (output, label). A callback is an object with any of the methods on_train_begin(logs),
    on_epoch_begin(epoch, logs), on_batch_end(batch, logs), on_epoch_end(epoch, logs) and on_train_end(logs)."""

    framework = "torch"
    suffix = ".pt"
    required: ClassVar = (*HorovodEstimator.required, "optimizer")
    objects: ClassVar = (*HorovodEstimator.objects, "loss_constructors")

    def _check(self) -> None:
        super()._check()
        model, optimizer = self.value("model"), self.value("optimizer")
        if not isinstance(model, torch.nn.Module):
            raise EstimatorError(f"model={model!r}: must be a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise EstimatorError(f"optimizer={optimizer!r}: must be a torch.optim.Optimizer")
        own = set(model.parameters())
        if any(p not in own for group in optimizer.param_groups for p in group["params"]):
            raise EstimatorError("the optimizer has parameters that are not the model's")
        loss = self._losses()
        if loss is None:
            raise EstimatorError(f"{type(self).__name__} needs loss")
        weighted = bool(self.value("sample_weight_col"))
        Loss(loss, self.value("loss_weights"), len(self.value("label_cols")), weighted)

    def _losses(self) -> Any:
        made = self.value("loss_constructors")
        if made is None:
            return self.value("loss")
        return [make() for make in made] if isinstance(made, (list, tuple)) else made()

    def _objects(self) -> dict[str, Any]:
        return {**super()._objects(), "loss": self._losses(), "loss_constructors": None}

    def _training(self) -> Callable[[Work], Outcome | None]:
        from horoplug.spark.torch.remote import train

        return train

    def _fitted(self, outcome: Outcome, values: dict[str, Any]) -> TorchModel:
        model = copy.deepcopy(self.value("model"))
        model.load_state_dict(torch.load(io.BytesIO(outcome.state), weights_only=True))
        return TorchModel(model=model, input_shapes=self.value("input_shapes"), **values)


@parameters(_INPUT_SHAPES)
class TorchModel(HorovodModel):
    """A trained module as a Spark ML model. ``getModel()`` is the module."""

    def _predictor(self) -> tuple[Callable[[bytes], Predict], bytes]:
        objects = {"model": self.value("model"), "input_shapes": self.value("input_shapes")}
        return load_predict, pickled(objects)
