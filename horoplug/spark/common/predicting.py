"""``transform``: a model's outputs as new columns, computed by Arrow batches in Spark's Python workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from pyspark.sql import types as T

from horoplug.spark.common.columns import ARRAY
from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.common.prepare import stored
from horoplug.spark.common.reading import stacked

Predict = Callable[[Sequence["np.ndarray[Any, Any]"]], "list[np.ndarray[Any, Any]]"]
"""A function from an array of rows for each feature to one for each output."""

_TEMPORARY: Final = "__horoplug_outputs"
_SCALARS: Final = {"float32": T.FloatType(), "float64": T.DoubleType(), "bool": T.BooleanType()}


@dataclasses.dataclass(frozen=True)
class Output:
    """One output for one row: ``dtype`` and ``shape`` of NumPy; ``kind``: that of the label's column."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = ""

    @property
    def is_scalar(self) -> bool:
        return math.prod(self.shape) == 1

    @property
    def type(self) -> Any:
        """The type of Spark that the function returns. Whole numbers become LongType."""
        if not self.is_scalar:
            return T.ArrayType(T.DoubleType())
        usual = T.LongType() if np.dtype(self.dtype).kind in "iu" else T.FloatType()
        return _SCALARS.get(self.dtype, usual)


def described(outputs: Sequence[np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    """Dtype and shape of each output for one row, as values for JSON."""
    return [{"dtype": str(o.dtype), "shape": list(o.shape[1:])} for o in outputs]


def with_predictions(
    df: Any,
    features: Sequence[str],
    outputs: Sequence[Output],
    names: Sequence[str],
    load: Callable[[bytes], Predict],
    content: bytes,
    batch_size: int,
) -> Any:
    """The DataFrame with a column for each output: a number, an array if the label was one, or else a dense vector.

    ``load`` makes the function from ``content`` in each Python worker. Raises EstimatorError for missing columns."""
    inputs = F.struct(*(stored(df, name)[0].alias(str(n)) for n, name in enumerate(features)))
    schema = T.StructType([T.StructField(str(n), o.type) for n, o in enumerate(outputs)])

    def predict(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        function = None
        for frame in frames:
            function = function or load(content)
            arrays = feature_arrays(frame, features)
            yield _frame(in_batches(function, arrays, batch_size), outputs)

    # pyspark reads the annotations, which must not be strings.
    predict.__annotations__ = {"frames": Iterator[pd.DataFrame], "return": Iterator[pd.DataFrame]}
    udf = F.pandas_udf(predict, returnType=schema)
    added = df.withColumn(_TEMPORARY, udf(inputs))
    columns = {
        name: _column(n, output)
        for n, (name, output) in enumerate(zip(names, outputs, strict=True))
    }
    kept = [F.col(f"`{name}`") for name in df.columns if name not in columns]
    return added.select(*kept, *(column.alias(name) for name, column in columns.items()))


def _column(number: int, output: Output) -> Any:
    column = F.col(f"{_TEMPORARY}.`{number}`")
    return column if output.is_scalar or output.kind == ARRAY else array_to_vector(column)


def feature_arrays(frame: pd.DataFrame, features: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """The features of some rows. Raises EstimatorError for nulls."""
    arrays = []
    for number, name in enumerate(features):
        series = frame[str(number)]
        nulls = int(series.isna().sum()) if series.dtype == object else 0
        if nulls:
            raise EstimatorError(
                f"column {name!r} has nulls in {nulls} of {len(series)} rows: drop or fill them, for example by df.na"
            )
        arrays.append(stacked(series, name))
    return arrays


def in_batches(
    function: Predict, arrays: Sequence[np.ndarray[Any, Any]], size: int
) -> list[np.ndarray[Any, Any]]:
    """Call a function with at most ``size`` rows at once."""
    rows = len(arrays[0])
    parts = [function([a[begin : begin + size] for a in arrays]) for begin in range(0, rows, size)]
    return [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]


def _frame(values: Sequence[np.ndarray[Any, Any]], outputs: Sequence[Output]) -> pd.DataFrame:
    if len(values) != len(outputs):
        raise EstimatorError(f"the model has {len(values)} outputs for {len(outputs)} columns")
    cells = {}
    for number, (value, output) in enumerate(zip(values, outputs, strict=True)):
        flat = value.reshape(len(value), -1)
        cells[str(number)] = flat[:, 0] if output.is_scalar else list(flat.astype("float64"))
    return pd.DataFrame(cells)
