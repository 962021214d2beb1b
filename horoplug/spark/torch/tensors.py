"""Batches as tensors, and the prediction function of ``transform``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from horoplug.spark.common.columns import reshape
from horoplug.spark.common.predicting import Predict

Shapes = Sequence[Sequence[int]] | None


def float_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the model's parameters, which floating-point features and labels get."""
    kinds = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """An array as a tensor: floating-point numbers as ``dtype``, whole numbers as int64."""
    if array.dtype.kind == "f":
        return torch.as_tensor(array.copy()).to(dtype)
    return torch.as_tensor(array.astype(bool if array.dtype.kind == "b" else "int64"))


def tensors(
    arrays: Sequence[np.ndarray[Any, Any]], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    wanted: Sequence[Sequence[int] | None] = shapes or [None] * len(arrays)
    shaped = [reshape(array, shape) for array, shape in zip(arrays, wanted, strict=True)]
    return [tensor(array, dtype).to(device) for array in shaped]


def as_list(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def load_predict(content: bytes) -> Predict:
    """The function for :func:`horoplug.spark.common.predicting.with_predictions`, from the pickled model and the
    shapes of its inputs. The driver has sent them."""
    objects = cloudpickle.loads(content)
    model, shapes = objects["model"], objects["input_shapes"]
    model.eval()
    dtype, device = float_dtype(model), torch.device("cpu")
    model.to(device)

    def predict(arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        with torch.inference_mode():
            outputs = as_list(model(*tensors(arrays, shapes, dtype, device)))
        return [output.numpy() for output in outputs]

    return predict
