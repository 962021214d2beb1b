"""Batches as a Keras model takes them, and the prediction function of ``transform``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cloudpickle
import keras
import numpy as np

from horoplug.spark.common.columns import reshape
from horoplug.spark.common.predicting import Predict

Array = np.ndarray[Any, Any]


def inputs_of(model: Any, arrays: Sequence[Array]) -> list[Array]:
    """Arrays with the shapes and dtypes of the model's inputs."""
    return [
        _shaped(array, tensor.shape).astype(str(tensor.dtype))
        for array, tensor in zip(arrays, model.inputs, strict=True)
    ]


def labels_of(
    model: Any, arrays: Sequence[Array], shapes: Sequence[Sequence[int]] | None
) -> list[Array]:
    """Labels with the given shapes, or else with that of their output if it has as many elements. Floating-point labels
    get Keras' default dtype."""
    labels = []
    for number, (array, tensor) in enumerate(zip(arrays, model.outputs, strict=True)):
        shaped = reshape(array, shapes[number]) if shapes else _shaped(array, tensor.shape)
        labels.append(shaped.astype(keras.config.floatx()) if array.dtype.kind == "f" else shaped)
    return labels


def _shaped(array: Array, shape: Sequence[int | None]) -> Array:
    """Rows in the shape of a tensor if they have as many elements, else as they are."""
    lengths = [length for length in list(shape)[1:] if length is not None]
    if len(lengths) + 1 != len(shape) or math.prod(lengths) != math.prod(array.shape[1:]):
        return array
    return array.reshape(len(array), *lengths)


def single(values: Sequence[Any]) -> Any:
    """What Keras takes: the only array, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)


def load_predict(content: bytes) -> Predict:
    """The function for :func:`horoplug.spark.common.predicting.with_predictions`. The driver has sent the content."""
    from horoplug.spark.keras.serialization import model_from_bytes

    values = cloudpickle.loads(content)
    model = model_from_bytes(values["model"], values["custom_objects"], trusted=True)

    def predict(arrays: Sequence[Array]) -> list[Array]:
        outputs = model.predict_on_batch(single(inputs_of(model, arrays)))
        several = isinstance(outputs, (list, tuple))
        return [np.asarray(output) for output in (outputs if several else [outputs])]

    return predict
