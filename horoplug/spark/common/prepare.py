"""Intermediate data: a DataFrame's columns as Parquet in the store, checked while the data is still Spark's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T

from horoplug.spark.common.columns import (
    ARRAY,
    SCALAR,
    VECTOR,
    Column,
    Metadata,
    unusable,
    write_metadata,
)
from horoplug.spark.common.errors import EstimatorError, StoreError, first_line
from horoplug.spark.common.store import Store

_DTYPES: Final = {
    T.BooleanType: "bool",
    T.ByteType: "int8",
    T.ShortType: "int16",
    T.IntegerType: "int32",
    T.LongType: "int64",
    T.FloatType: "float32",
    T.DoubleType: "float64",
    T.DecimalType: "float64",
}
_DEFAULT_PARTITIONS: Final = 10  # of the intermediate data, per rank
_VALIDATION: Final = "__horoplug_validation"


def stored(df: Any, name: str) -> tuple[Any, str, str]:
    """How a column is stored: an expression for a number or a flat array, its kind, and the dtype of its elements.

    Raises EstimatorError if the DataFrame lacks it, or for a type that is not numeric."""
    if name not in df.columns:
        raise EstimatorError(
            f"the DataFrame has no column {name!r}; it has: {', '.join(df.columns)}"
        )
    column, kind = F.col(f"`{name}`"), df.schema[name].dataType
    if isinstance(kind, VectorUDT):
        return vector_to_array(column), VECTOR, "float64"
    element, depth = kind, 0
    while isinstance(element, T.ArrayType):
        element, depth = element.elementType, depth + 1
    dtype = _DTYPES.get(type(element))
    if dtype is None:
        raise unusable(name, kind.simpleString())
    for _ in range(depth - 1):
        column = F.flatten(column)
    if isinstance(element, T.DecimalType):
        column = column.cast("array<double>" if depth else "double")
    return column, ARRAY if depth else SCALAR, dtype


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to prepare: the columns that are used, and how."""

    columns: Sequence[str]
    validation: float | str | None = None
    ranks: int = 1
    partitions_per_process: int | None = None
    shuffle: bool = True
    seed: int | None = None


@contextlib.contextmanager
def prepared(df: Any, store: Store, plan: Plan, idx: str) -> Iterator[Metadata]:
    """Write a DataFrame as the intermediate data ``idx`` of a store, and delete it at the end.

    Raises EstimatorError for unusable data, StoreError for an unusable store."""
    if not store.visible_to_executors():
        raise StoreError(
            f"Spark cannot write to the store {store.prefix_path}, since only one process sees it: use a folder that "
            "the driver and all executors share"
        )
    store.check_writable()
    try:
        yield write_data(df, store, plan, idx)
    finally:
        for path in (store.get_train_data_path(idx), store.get_val_data_path(idx)):
            with contextlib.suppress(OSError):
                store.delete(path)


def write_data(df: Any, store: Store, plan: Plan, idx: int | str | None) -> Metadata:
    """Check a DataFrame, and write it as the intermediate data ``idx``. See :func:`prepared`."""
    names = list(dict.fromkeys(plan.columns))
    forms = {name: stored(df, name) for name in names}
    selected = df.select(
        *(form.alias(name) for name, (form, _, _) in forms.items()),
        _validation(df, plan).alias(_VALIDATION),
    ).persist()
    try:
        columns, rows, val_rows = _inspect(selected, forms)
        if plan.validation is not None and not 0 < val_rows < rows:
            which = "validation" if not val_rows else "training"
            raise EstimatorError(
                f"validation={plan.validation!r} leaves no rows for {which} of {rows} rows"
            )
        metadata = Metadata(columns, rows - val_rows, val_rows)
        parts = [
            (store.get_train_data_path(idx), ~F.col(_VALIDATION), metadata.train_rows),
            (store.get_val_data_path(idx), F.col(_VALIDATION), val_rows),
        ]
        for path, condition, number in parts:
            store.delete(path)
            if number:
                chosen = selected.where(condition).drop(_VALIDATION)
                _write(_partitioned(chosen, plan, number), store, path)
    finally:
        selected.unpersist()
    write_metadata(store, store.get_train_data_path(idx), metadata)
    return metadata


def _validation(df: Any, plan: Plan) -> Any:
    """An expression that is true for the rows of the validation data. Rows of a column's null become rows for
    training."""
    choice = plan.validation
    if choice is None:
        return F.lit(False)
    if isinstance(choice, str):
        stored(df, choice)  # whether it exists
        if isinstance(df.schema[choice].dataType, (T.ArrayType, VectorUDT)):
            raise EstimatorError(f"validation={choice!r}: the column must be a boolean or a number")
        return F.coalesce(F.col(f"`{choice}`").cast("boolean"), F.lit(False))
    return F.rand(plan.seed if plan.seed is not None else 0) < choice


def _inspect(
    df: Any, forms: dict[str, tuple[Any, str, str]]
) -> tuple[tuple[Column, ...], int, int]:
    """The columns, the number of rows and that of the validation data, in one pass over the data.

    Raises EstimatorError for a DataFrame without rows, for nulls, and for arrays of different lengths."""
    wanted = [F.count(F.lit(1)), F.count_if(F.col(_VALIDATION))]
    for name, (_, kind, _) in forms.items():
        column = F.col(f"`{name}`")
        missing = column.isNull()
        if kind != SCALAR:
            missing = missing | F.exists(column, lambda element: element.isNull())
        size = F.lit(1) if kind == SCALAR else F.size(column)
        wanted += [F.count_if(missing), F.min(size), F.max(size)]
    rows, val_rows, *rest = df.agg(*(w.alias(str(n)) for n, w in enumerate(wanted))).first()
    if not rows:
        raise EstimatorError("the DataFrame has no rows")
    columns = []
    for number, (name, (_, kind, dtype)) in enumerate(forms.items()):
        nulls, least, most = rest[3 * number : 3 * number + 3]
        if nulls:
            raise EstimatorError(
                f"column {name!r} has nulls in {nulls} of {rows} rows: drop or fill them, for example by df.na"
            )
        if least != most:
            raise EstimatorError(
                f"column {name!r} has arrays of {least} to {most} elements: pad them to one length"
            )
        if not most:
            raise EstimatorError(f"column {name!r} has arrays without elements")
        columns.append(Column(name, kind, dtype, most))
    return tuple(columns), rows, val_rows


def _partitioned(df: Any, plan: Plan, rows: int) -> Any:
    """The data in as many files as the ranks can use, in its own order unless it is shuffled anyway."""
    number = min(rows, plan.ranks * (plan.partitions_per_process or _DEFAULT_PARTITIONS))
    return df.repartition(number) if plan.shuffle else df.coalesce(number)


def _write(df: Any, store: Store, path: str) -> None:
    try:
        df.write.mode("overwrite").parquet(store.get_spark_path(path))
    except Exception as error:  # py4j's or Spark's
        raise StoreError(f"Spark cannot write {path}: {first_line(error)}") from error
