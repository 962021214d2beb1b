"""``KerasEstimator`` and ``KerasModel``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import keras

from horoplug.spark.common.columns import Metadata, check_shapes
from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.common.estimator import HorovodEstimator, HorovodModel
from horoplug.spark.common.params import Spec, parameters
from horoplug.spark.common.predicting import Predict
from horoplug.spark.common.work import Outcome, Work, pickled
from horoplug.spark.keras import worker
from horoplug.spark.keras.serialization import (
    codec,
    model_bytes,
    model_from_bytes,
    portable,
    set_weights,
)

_CUSTOM_OBJECTS: Final = Spec(
    "custom_objects", None, "classes and functions of the model that Keras lacks, by name"
)


@parameters(_CUSTOM_OBJECTS, Spec("checkpoint_callback", None, "one more callback"))
class KerasEstimator(HorovodEstimator):
    """Trains a Keras 3 model, with one input for each feature column and one output for each label column, in this
    order.

    The optimizer, losses and metrics are those of ``model.compile``; the model itself need not be compiled. The ranks
    use the driver's backend of Keras. ``verbose`` has Keras' meaning: 1 a progress bar, 2 a line per epoch."""

    framework = "keras"
    suffix = ".keras"
    required: ClassVar = (*HorovodEstimator.required, "optimizer", "loss")
    objects: ClassVar = (*HorovodEstimator.objects, "custom_objects", "checkpoint_callback")
    formats: ClassVar = {"model": "keras"}
    codecs: ClassVar = {"keras": codec}

    def _check(self) -> None:
        super()._check()
        model = self.value("model")
        _check_model(model)
        for name in ("optimizer", "loss", "metrics", "callbacks"):
            _check_version(name, self.value(name))
        for name, tensors in (("feature_cols", model.inputs), ("label_cols", model.outputs)):
            if len(self.value(name)) != len(tensors):
                what = "inputs" if name == "feature_cols" else "outputs"
                raise EstimatorError(
                    f"the model has {len(tensors)} {what}, and {name} has {len(self.value(name))} columns"
                )

    def _check_columns(self, metadata: Metadata) -> None:
        super()._check_columns(metadata)
        columns = [metadata.column(name) for name in self.value("feature_cols")]
        shapes = [[-1 if n is None else n for n in t.shape] for t in self.value("model").inputs]
        check_shapes(columns, shapes, "the model's inputs")

    def _objects(self) -> dict[str, Any]:
        objects = super()._objects()
        changed = {name: portable(objects[name]) for name in ("optimizer", "loss", "metrics")}
        if isinstance(changed["optimizer"], str):
            changed["optimizer"] = portable(keras.optimizers.get(changed["optimizer"]))
        return {**objects, **changed, "model": model_bytes(self.value("model"))}

    def _training(self) -> Callable[[Work], Outcome | None]:
        return partial(worker.train, backend=keras.backend.backend())

    def _fitted(self, outcome: Outcome, values: dict[str, Any]) -> KerasModel:
        custom = self.value("custom_objects")
        model = model_from_bytes(model_bytes(self.value("model")), custom, trusted=True)
        set_weights(model, outcome.state)
        return KerasModel(model=model, custom_objects=custom, **values)


@parameters(
    _CUSTOM_OBJECTS, Spec("_floatx", None, "accepted for compatibility with Horovod", "text")
)
class KerasModel(HorovodModel):
    """A trained Keras model as a Spark ML model. ``getModel()`` is the Keras model."""

    formats: ClassVar = {"model": "keras"}
    codecs: ClassVar = {"keras": codec}

    def _predictor(self) -> tuple[Callable[[bytes], Predict], bytes]:
        model = self.value("model")
        _check_model(model)
        rest = pickled(
            {"model": model_bytes(model), "custom_objects": self.value("custom_objects")}
        )
        return worker.load_predict, pickle.dumps((keras.backend.backend(), rest))


def _check_model(model: Any) -> None:
    """Raises EstimatorError for anything but a built model of Keras 3."""
    _check_version("model", model)
    if not isinstance(model, keras.Model):
        raise EstimatorError(f"model={model!r}: must be a keras.Model")
    if getattr(model, "inputs", None) and getattr(model, "outputs", None):
        return
    kind = type(model).__name__
    if isinstance(model, keras.Sequential):
        way = "begin it with keras.Input"
    else:
        way = (
            f"call it on inputs = keras.Input(shape), pass keras.Model(inputs, model(inputs)), and name its class in "
            f"custom_objects={{{kind!r}: {kind}}}"
        )
    raise EstimatorError(f"model {model.name!r}, a {kind}, does not know its inputs: {way}")


def _check_version(name: str, value: Any) -> None:
    """Raises EstimatorError for an object of Keras 2."""
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_version(name, each)
        return
    modules = (f"{base.__module__}." for base in type(value).__mro__)
    # Keras 3 with TensorFlow has other base classes of the package tensorflow.
    old = [m for m in modules if m.startswith(("tf_keras.", "tensorflow.python.keras."))]
    if old:
        raise EstimatorError(
            f"{name}: a {type(value).__name__} of Keras 2 ({old[0].partition('.')[0]}), and the estimator takes Keras "
            "3: make it with the package keras, without TF_USE_LEGACY_KERAS, or train it with horoplug.tensorflow."
            "keras in a function of horoplug.spark.run"
        )
