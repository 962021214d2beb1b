"""Keras objects as bytes: models in Keras' own format, losses and metrics by their configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import keras
import numpy as np

from horoplug.spark.common.errors import EstimatorError, first_line

_HISTORY: Final = "horoplug.json"  # a member of the .keras archive, which Keras ignores


def model_bytes(model: Any) -> bytes:
    """A model as the content of a ``.keras`` file."""
    with _temporary() as path:
        model.save(path)
        return path.read_bytes()


def model_from_bytes(
    content: bytes, custom_objects: Mapping[str, Any] | None = None, trusted: bool = False
) -> Any:
    """The model, not compiled. ``trusted``: whether code in it, such as that of Lambda layers, may be loaded."""
    with _temporary(content) as path:
        try:
            return keras.saving.load_model(
                path, custom_objects=custom_objects, compile=False, safe_mode=not trusted
            )
        except Exception as error:  # of Keras, or of the user's own classes
            if not trusted:
                raise
            raise EstimatorError(
                "the model cannot be made again from its configuration; its own classes and functions must be in "
                f"custom_objects, and have get_config if they take other arguments ({first_line(error)})"
            ) from error


def weights_bytes(model: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, *model.get_weights())
    return buffer.getvalue()


def set_weights(model: Any, content: bytes) -> None:
    """Set the weights that :func:`weights_bytes` has written."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        model.set_weights([arrays[f"arr_{n}"] for n in range(len(arrays.files))])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_bytes(model: Any, history: dict[str, list[Any]]) -> bytes:
    """A ``.keras`` file of a compiled model, with the history of all epochs beside it."""
    with _temporary() as path:
        model.save(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(_HISTORY, json.dumps(history))
        return path.read_bytes()


def load_checkpoint(model: Any, content: bytes) -> dict[str, list[Any]]:
    """Load weights and the optimizer's state into a compiled model. Returns the history. Loads no code."""
    model.optimizer.build(model.trainable_variables)
    with _temporary(content) as path:
        model.load_weights(path)
        with zipfile.ZipFile(path) as archive:
            history: dict[str, list[Any]] = json.loads(archive.read(_HISTORY))
    return history


@contextlib.contextmanager
def _temporary(content: bytes | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="horoplug-") as folder:
        path = Path(folder) / "model.keras"
        if content is not None:
            path.write_bytes(content)
        yield path


# ---- losses, metrics, optimizers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A Keras object by its configuration, which can be pickled."""

    values: dict[str, Any]

    def make(self, custom_objects: Mapping[str, Any] | None) -> Any:
        return keras.saving.deserialize_keras_object(
            self.values, custom_objects=custom_objects, safe_mode=False
        )


def portable(value: Any) -> Any:
    """Keras objects in lists and dictionaries as their configurations. Names and functions stay as they are."""
    if isinstance(value, (list, tuple)):
        return [portable(each) for each in value]
    if isinstance(value, dict):
        return {name: portable(each) for name, each in value.items()}
    kinds = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)
    if isinstance(value, kinds):
        return Configuration(keras.saving.serialize_keras_object(value))
    return value


def restored(value: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    """The inverse of :func:`portable`."""
    if isinstance(value, list):
        return [restored(each, custom_objects) for each in value]
    if isinstance(value, dict):
        return {name: restored(each, custom_objects) for name, each in value.items()}
    return value.make(custom_objects) if isinstance(value, Configuration) else value


def codec() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """How models are saved by Spark ML. Models with code in them, as that of Lambda layers, are not loaded."""
    return model_bytes, model_from_bytes
