"""Entry points in Spark's Python workers, which choose Keras' backend before they import Keras."""

from __future__ import annotations

import os
import pickle
import sys

from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.common.predicting import Predict
from horoplug.spark.common.work import Outcome, Work


def use_backend(name: str) -> None:
    """Raises EstimatorError if this process has imported Keras with another backend."""
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    import keras

    if keras.backend.backend() != name:
        raise EstimatorError(
            f"this Python worker uses Keras with {keras.backend.backend()}, and the driver with {name}: set "
            "KERAS_BACKEND to one of them before the Spark session starts"
        )


def train(work: Work, backend: str) -> Outcome | None:
    """Train on this rank. Returns a result on rank 0."""
    use_backend(backend)
    from horoplug.spark.keras import remote

    return remote.train(work)


def load_predict(content: bytes) -> Predict:
    """The prediction function. ``content``: the pickled name of the backend and content for
    :func:`horoplug.spark.keras.arrays.load_predict`, which the driver has sent."""
    backend, rest = pickle.loads(content)
    use_backend(backend)
    from horoplug.spark.keras import arrays

    return arrays.load_predict(rest)
