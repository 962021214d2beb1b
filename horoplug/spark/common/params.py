"""The parameters of estimators and models, as tables of Spark ML parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

try:
    from pyspark.ml.param import Param, Params
except ImportError as error:
    raise ImportError(
        f"the estimators need pyspark: pip install 'horoplug[spark]' ({error})"
    ) from error

from horoplug.spark.common.errors import EstimatorError

_Class = TypeVar("_Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One parameter. ``check``: the name of its rule in :data:`RULES`."""

    name: str
    default: Any
    doc: str
    check: str = ""


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _columns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


RULES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "positive": (_whole(1), "a whole number of at least 1"),
    "count": (_whole(0), "a whole number of at least 0"),
    "flag": (lambda value: value in (True, False), "True or False"),
    "columns": (_columns, "a list of names of columns"),
    "callable": (callable, "a function"),
    "list": (lambda value: isinstance(value, (list, tuple)), "a list"),
    "text": (lambda value: isinstance(value, str), "a name"),
    "split": (
        lambda value: (
            isinstance(value, str) or (isinstance(value, (int, float)) and 0 <= value < 1)
        ),
        "a fraction in [0, 1) or the name of a column",
    ),
}

ESTIMATOR: Final = (
    Spec("num_proc", None, "number of ranks; None: the backend's own number", "positive"),
    Spec("backend", None, "where ranks run; None: SparkBackend(num_proc)"),
    Spec("store", None, "the Store for intermediate data and checkpoints"),
    Spec("model", None, "the model to train"),
    Spec("optimizer", None, "the optimizer, which need not be distributed"),
    Spec("loss", None, "the loss, or one for each label column"),
    Spec("loss_weights", None, "a factor for each label column's loss", "list"),
    Spec("metrics", None, "metrics to compute in each epoch", "list"),
    Spec("feature_cols", None, "columns that are the model's inputs, in their order", "columns"),
    Spec("label_cols", None, "columns that the model's outputs are compared with", "columns"),
    Spec("label_shapes", None, "a shape for each label column, whose first number is -1", "list"),
    Spec("sample_weight_col", None, "column with the weight of each row", "text"),
    Spec("continuous_cols", None, "accepted for compatibility with Horovod; no effect", "columns"),
    Spec("categorical_cols", None, "accepted for compatibility with Horovod; no effect", "columns"),
    Spec("validation", None, "fraction of the rows, or column that is true for rows, for validation", "split"),
    Spec("gradient_compression", None, "compression of gradients: Compression.fp16 and others"),
    Spec("backward_passes_per_step", 1, "batches whose gradients are added for one step", "positive"),
    Spec("callbacks", None, "callbacks, which run on all ranks", "list"),
    Spec("batch_size", 32, "rows of a batch on each rank", "positive"),
    Spec("val_batch_size", None, "rows of a batch in validation; None: batch_size", "positive"),
    Spec("epochs", 1, "number of epochs in sum, with those of the run that is resumed", "count"),
    Spec("verbose", 1, "0: silent; 1: a line per epoch; 2: a progress bar on rank 0", "count"),
    Spec("random_seed", None, "seed for the split, the order of rows and the framework", "count"),
    Spec("shuffle", True, "whether the order of rows changes in each epoch", "flag"),
    Spec("shuffle_buffer_size", None, "rows among which a rank shuffles; None: 100,000", "positive"),
    Spec("partitions_per_process", None, "files of intermediate data per rank; None: 10", "positive"),
    Spec("run_id", None, "the name of the run; that of an earlier run resumes it", "text"),
    Spec("train_steps_per_epoch", None, "batches per epoch on each rank; None: all rows once", "positive"),
    Spec("validation_steps_per_epoch", None, "batches of a validation; None: all rows once", "positive"),
    Spec("transformation_fn", None, "function from a pandas.DataFrame of rows to one with as many", "callable"),
    Spec("train_reader_num_workers", 2, "threads that read training data ahead", "count"),
    Spec("val_reader_num_workers", 2, "threads that read validation data ahead", "count"),
    Spec("reader_pool_type", "thread", "'dummy' reads without threads; other values read with threads", "text"),
    Spec("inmemory_cache_all", False, "whether a rank keeps its share of the data in memory", "flag"),
    Spec("use_gpu", True, "whether ranks use GPUs, where there are any", "flag"),
    Spec("mp_start_method", None, "accepted for compatibility with Horovod; no effect", "text"),
    Spec("data_module", None, "not supported: must be None"),
)  # fmt: skip

MODEL: Final = (
    Spec("model", None, "the trained model"),
    Spec("history", None, "losses and metrics of each epoch"),
    Spec("feature_columns", None, "columns that are the model's inputs, in their order", "columns"),
    Spec("label_columns", None, "columns that the model's outputs correspond to", "columns"),
    Spec("output_cols", None, "columns that transform() adds; None: LABEL__output", "columns"),
    Spec("run_id", None, "the name of the run that trained the model", "text"),
    Spec("batch_size", 1024, "rows that the model gets at once in transform()", "positive"),
    Spec("_metadata", None, "the columns of the training data and the outputs, as JSON", "text"),
)

# Where Horovod's methods are not named after the parameter.
_METHOD_NAMES: Final = {
    "inmemory_cache_all": "InMemoryCacheAll",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
}


def parameters(*specs: Spec) -> Callable[[_Class], _Class]:
    """Class decorator: a Spark ML parameter with methods ``getX`` and ``setX`` for each row, and the signature of the
    constructor."""

    def decorate(cls: _Class) -> _Class:
        named = {spec.name: spec for spec in (*getattr(cls, "_specs", ()), *specs)}
        cls._specs = tuple(named.values())  # type: ignore[attr-defined]
        for spec in specs:
            setattr(cls, spec.name, Param(Params._dummy(), spec.name, spec.doc))
            usual = "".join(word.capitalize() for word in spec.name.split("_"))
            for suffix in {usual, _METHOD_NAMES.get(spec.name, usual)}:
                setattr(cls, f"get{suffix}", _getter(spec))
                setattr(cls, f"set{suffix}", _setter(spec))
        kind = inspect.Parameter.KEYWORD_ONLY
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(s.name, kind, default=s.default) for s in named.values()]
        )
        return cls

    return decorate


def _getter(spec: Spec) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(spec.name)

    get.__doc__ = f"The value of ``{spec.name}``: {spec.doc}."
    return get


def _setter(spec: Spec) -> Callable[[Any, Any], Any]:
    def put(self: Any, value: Any) -> Any:
        return self.setParams(**{spec.name: value})

    put.__doc__ = f"Set ``{spec.name}``: {spec.doc}. Returns the object itself."
    return put


class TableParams(Params):  # type: ignore[misc]
    """The base of classes with :func:`parameters`. All arguments of the constructor are keywords."""

    _specs: tuple[Spec, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._setDefault(**{spec.name: spec.default for spec in self._specs})
        self.setParams(**options)

    def setParams(self, **options: Any) -> Any:
        """Set several parameters; None restores the default. Returns the object itself.

        Raises TypeError for an unknown name, EstimatorError for an invalid value."""
        known = {spec.name: spec for spec in self._specs}
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}")
            if value is None:
                self.clear(self.getParam(name))
                continue
            check_value(known[name], value)
            self._set(**{name: value})
        return self

    def value(self, name: str) -> Any:
        """The value of a parameter, or its default."""
        return self.getOrDefault(name)

    def check_values(self) -> None:
        """Check all values, since Spark's own methods, such as ``fit(df, {…})``, set them unchecked."""
        for spec in self._specs:
            value = self.value(spec.name)
            if value is not None:
                check_value(spec, value)


def check_value(spec: Spec, value: Any) -> None:
    """Raises EstimatorError for an invalid value."""
    if spec.check:
        valid, text = RULES[spec.check]
        if not valid(value):
            raise EstimatorError(f"{spec.name}={value!r}: must be {text}")


@parameters(*ESTIMATOR)
class EstimatorParams(TableParams):
    """The parameters of all estimators."""


@parameters(*MODEL)
class ModelParams(TableParams):
    """The parameters of all models."""
