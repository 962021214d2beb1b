"""The columns of intermediate data: what is in them, as a JSON file beside the Parquet files."""

from __future__ import annotations

import dataclasses
import json
import math
import posixpath
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from horoplug.spark.common.errors import EstimatorError, StoreError
from horoplug.spark.common.store import Store

METADATA_FILE: Final = "_horoplug.json"  # Spark and pyarrow ignore files whose names begin with _
SCALAR, ARRAY, VECTOR = "scalar", "array", "vector"


@dataclasses.dataclass(frozen=True)
class Column:
    """A column whose values all have the same type and number of elements.

    ``kind``: what it is in Spark: scalar, array or vector; ``dtype``: NumPy's name of the type of its elements;
    ``size``: elements per value."""

    name: str
    kind: str
    dtype: str
    size: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return () if self.kind == SCALAR else (self.size,)


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The columns and the numbers of rows of intermediate data."""

    columns: tuple[Column, ...]
    train_rows: int
    val_rows: int = 0

    def column(self, name: str) -> Column:
        """Raises EstimatorError for a column that the data does not have."""
        for column in self.columns:
            if column.name == name:
                return column
        known = ", ".join(column.name for column in self.columns)
        raise EstimatorError(f"the data has no column {name!r}; it has: {known}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Metadata:
        values = json.loads(text)
        columns = tuple(Column(**column) for column in values.pop("columns"))
        return cls(columns, **values)


def write_metadata(store: Store, folder: str, metadata: Metadata) -> None:
    store.write_text(posixpath.join(folder, METADATA_FILE), metadata.to_json())


def read_metadata(store: Store, idx: int | str | None, names: Sequence[str]) -> Metadata:
    """The metadata of intermediate data, of which the columns ``names`` are used. If there is no file with metadata, as
    in Parquet that another program has written, they are found in the Parquet files.

    Raises EstimatorError for unusable columns, StoreError if there is no data."""
    train, val = store.get_train_data_path(idx), store.get_val_data_path(idx)
    file = posixpath.join(train, METADATA_FILE)
    if store.exists(file):
        metadata = Metadata.from_json(store.read(file))
    else:
        if not store.exists(train):
            raise StoreError(f"there is no {train}: write Parquet there, or call fit(df)")
        data = store.get_parquet_dataset(train)
        missing = [name for name in names if name not in data.schema.names]
        if missing:
            known = ", ".join(data.schema.names)
            raise EstimatorError(f"{train} has no column {missing[0]!r}; it has: {known}")
        head = data.head(1, columns=list(names))
        if not head.num_rows:
            raise EstimatorError(f"{train} has no rows")
        columns = tuple(_from_arrow(head.column(name), name) for name in names)
        rows = store.get_parquet_dataset(val).count_rows() if store.exists(val) else 0
        metadata = Metadata(columns, data.count_rows(), rows)
    for name in names:
        metadata.column(name)
    return metadata


def _from_arrow(values: Any, name: str) -> Column:
    value = values[0].as_py()
    if isinstance(value, list):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.ndim != 1:
            raise unusable(name, str(values.type))
        dtype = str(values.type.value_type.to_pandas_dtype()(0).dtype)
        return Column(name, ARRAY, dtype, len(value))
    kind = np.dtype(values.type.to_pandas_dtype())
    if kind.kind not in "biuf":
        raise unusable(name, str(values.type))
    return Column(name, SCALAR, str(kind))


def unusable(name: str, kind: str) -> EstimatorError:
    """The error about a column whose type is not numeric."""
    return EstimatorError(
        f"column {name!r} has the type {kind}: convert it to numbers, arrays of numbers or vectors, for example by "
        "pyspark.ml.feature.StringIndexer"
    )


def check_shapes(
    columns: Sequence[Column], shapes: Sequence[Sequence[int]] | None, what: str
) -> None:
    """Check that the values of each column can have the shape given for it, of which -1 is the number of rows (first)
    or any number. Raises EstimatorError."""
    if shapes is None:
        return
    if len(shapes) != len(columns):
        raise EstimatorError(f"{what} has {len(shapes)} shapes for {len(columns)} columns")
    for column, shape in zip(columns, shapes, strict=True):
        own = [length for length in list(shape)[1:] if length != -1]
        total = math.prod(own)
        free = -1 in list(shape)[1:]
        if (column.size % total if free else column.size != total) or not len(shape):
            raise EstimatorError(
                f"{what}: column {column.name!r} has {column.size} elements per row, which do not fit {list(shape)}"
            )


def reshape(array: np.ndarray[Any, Any], shape: Sequence[int] | None) -> np.ndarray[Any, Any]:
    """Rows in the shape that the model wants: its first number is that of the rows, whatever it says."""
    return array if shape is None else array.reshape(len(array), *list(shape)[1:])
