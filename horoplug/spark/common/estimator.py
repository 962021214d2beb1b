"""The estimators and models of all frameworks, as far as they are the same."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

try:
    import pandas as _pandas  # noqa: F401
    import pyarrow as _pyarrow  # noqa: F401
    from pyspark.ml import Estimator, Model
except ImportError as error:
    raise ImportError(
        f"the estimators need pyspark, pandas and pyarrow: pip install 'horoplug[spark]' ({error})"
    ) from error

from horoplug.spark.common.backend import Backend, SparkBackend
from horoplug.spark.common.columns import Metadata, check_shapes, read_metadata
from horoplug.spark.common.errors import EstimatorError
from horoplug.spark.common.params import EstimatorParams, ModelParams
from horoplug.spark.common.predicting import (
    Output,
    Predict,
    described,
    feature_arrays,
    with_predictions,
)
from horoplug.spark.common.prepare import Plan, prepared, stored
from horoplug.spark.common.saving import Saveable
from horoplug.spark.common.store import Store
from horoplug.spark.common.work import Outcome, Work, pickled


class HorovodEstimator(Estimator, EstimatorParams, Saveable):  # type: ignore[misc]
    """Trains a model on a DataFrame: ``fit(df)`` writes the used columns to the store, starts the ranks, and returns a
    :class:`HorovodModel`.

    Errors of ``fit``, each in one line: EstimatorError for invalid parameters, for columns that are missing, not
    numeric or have nulls, and for a DataFrame without rows; StoreError for a store that cannot be written; the
    backend's error if a rank fails."""

    framework: ClassVar[str]
    suffix: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ("model", "store", "feature_cols", "label_cols")
    objects: ClassVar[tuple[str, ...]] = (
        "model",
        "optimizer",
        "loss",
        "metrics",
        "callbacks",
        "gradient_compression",
        "transformation_fn",
    )
    """Parameters that are pickled for the ranks. The others, but for the store and the backend, have simple values."""

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _training(self) -> Callable[[Work], Outcome | None]:
        """The function that every rank calls. Only rank 0 returns a result."""

    @abstractmethod
    def _fitted(self, outcome: Outcome, values: dict[str, Any]) -> Any:
        """The trained model. ``values``: parameters that all models have."""

    def _objects(self) -> dict[str, Any]:
        """The objects that are pickled for the ranks, by name."""
        return {name: self.value(name) for name in self.objects}

    def _check(self) -> None:
        """Raises EstimatorError for parameters that do not fit together."""
        self.check_values()
        for name in self.required:
            if self.value(name) in (None, []):
                raise EstimatorError(f"{type(self).__name__} needs {name}")
        if not isinstance(self.value("store"), Store):
            raise EstimatorError(f"store={self.value('store')!r}: must be made by Store.create")
        backend = self.value("backend")
        if backend is not None and not isinstance(backend, Backend):
            raise EstimatorError(f"backend={backend!r}: must be a Backend, such as SparkBackend()")
        if backend is not None and self.value("num_proc") not in (None, backend.num_processes()):
            raise EstimatorError("give num_proc or a backend, which has its own number of ranks")
        if self.value("data_module") is not None:
            raise EstimatorError("data_module is not supported: remove it to read with pyarrow")
        labels = self.value("label_cols")
        for name in ("loss", "loss_weights", "label_shapes"):
            value = self.value(name)
            if isinstance(value, (list, tuple)) and len(value) != len(labels):
                raise EstimatorError(f"{name} has {len(value)} items for {len(labels)} label_cols")

    def _check_columns(self, metadata: Metadata) -> None:
        """Raises EstimatorError for columns that do not have the shapes that the parameters give."""
        labels = [metadata.column(name) for name in self.value("label_cols")]
        check_shapes(labels, self.value("label_shapes"), "label_shapes")
        if weight := self.value("sample_weight_col"):
            check_shapes([metadata.column(weight)], [[-1]], "sample_weight_col")

    # ---- fitting -----------------------------------------------------------------------------------------------------

    def _fit(self, df: Any) -> Any:
        self._check()
        payload, store, backend = pickled(self._objects()), self.value("store"), self._backend()
        plan = Plan(
            columns=self._columns(),
            validation=self.value("validation") or None,
            ranks=backend.num_processes(),
            partitions_per_process=self.value("partitions_per_process"),
            shuffle=self.value("shuffle"),
            seed=self.value("random_seed"),
        )
        idx = secrets.token_hex(8)  # two fits at a time do not meet
        with prepared(df, store, plan, idx) as metadata:
            return self._train(backend, metadata, idx, payload)

    def fit_on_parquet(
        self, params: Mapping[Any, Any] | None = None, dataset_idx: int | str | None = None
    ) -> Any:
        """Train on Parquet that is in the store already, at ``store.get_train_data_path(dataset_idx)``, and validate on
        that at ``get_val_data_path(dataset_idx)``, if there is any.

        params: parameters for this training only, as in ``fit(df, params)``. The data stays in the store."""
        estimator = self.copy(dict(params)) if params else self
        estimator._check()
        payload, store = pickled(estimator._objects()), estimator.value("store")
        metadata = read_metadata(store, dataset_idx, estimator._columns())
        store.check_writable()
        return estimator._train(estimator._backend(), metadata, dataset_idx, payload)

    def _backend(self) -> Backend:
        backend: Backend = self.value("backend") or SparkBackend(self.value("num_proc"))
        return backend

    def _columns(self) -> list[str]:
        weight = self.value("sample_weight_col")
        return [
            *self.value("feature_cols"),
            *self.value("label_cols"),
            *([weight] if weight else []),
        ]

    def _train(
        self, backend: Backend, metadata: Metadata, idx: int | str | None, payload: bytes
    ) -> Any:
        self._check_columns(metadata)
        store = self.value("store")
        left_out = {*self.objects, "store", "backend", "data_module"}
        work = Work(
            store=store,
            data_idx=idx,
            run_id=self.value("run_id") or store.new_run_id(self.framework),
            metadata=metadata,
            options={s.name: self.value(s.name) for s in self._specs if s.name not in left_out},
            payload=payload,
            suffix=self.suffix,
        )
        outcome = backend.run(self._training(), args=(work,))[0]
        labels = self.value("label_cols")
        kinds = [metadata.column(name).kind for name in labels]
        values = {
            "history": outcome.history,
            "feature_columns": list(self.value("feature_cols")),
            "label_columns": list(labels),
            "run_id": work.run_id,
            "_metadata": json.dumps({"outputs": outcome.outputs, "kinds": kinds}),
        }
        return self._fitted(outcome, values)


class HorovodModel(Model, ModelParams, Saveable):  # type: ignore[misc]
    """A trained model: ``transform(df)`` adds its outputs as columns.

    Errors of ``transform``: EstimatorError with one line for missing columns and, when Spark computes the rows, for
    nulls."""

    @abstractmethod
    def _predictor(self) -> tuple[Callable[[bytes], Predict], bytes]:
        """The function that makes the predicting function in a worker, and its argument."""

    def _get_metadata(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.value("_metadata") or "{}")
        return values

    def _names(self) -> list[str]:
        labels = self.value("label_columns") or []
        names = self.value("output_cols") or [f"{name}__output" for name in labels]
        if not names:
            raise EstimatorError(f"{type(self).__name__} needs label_columns or output_cols")
        return list(names)

    def _transform(self, df: Any) -> Any:
        self.check_values()
        for name in ("model", "feature_columns"):
            if self.value(name) in (None, []):
                raise EstimatorError(f"{type(self).__name__} needs {name}")
        features, names = self.value("feature_columns"), self._names()
        load, content = self._predictor()
        outputs = self._outputs(df, load, content) or [Output("float32", ())] * len(names)
        if len(outputs) != len(names):
            raise EstimatorError(
                f"the model has {len(outputs)} outputs, and output_cols has {len(names)} names"
            )
        return with_predictions(
            df, features, outputs, names, load, content, self.value("batch_size")
        )

    def _outputs(
        self, df: Any, load: Callable[[bytes], Predict], content: bytes
    ) -> list[Output] | None:
        """The outputs, which training may have recorded. Otherwise the driver computes one row; None: there is none
        without nulls."""
        metadata = self._get_metadata()
        known, kinds = metadata.get("outputs"), metadata.get("kinds", ())
        if not known:
            features = self.value("feature_columns")
            forms = [stored(df, name)[0].alias(str(n)) for n, name in enumerate(features)]
            row = df.select(*forms).dropna().limit(1).toPandas()
            if not len(row):
                return None
            known = described(load(content)(feature_arrays(row, features)))
        kinds = [*kinds, *([""] * len(known))][: len(known)]
        return [
            Output(**{"kind": kind, **each, "shape": tuple(each["shape"])})
            for each, kind in zip(known, kinds, strict=True)
        ]
