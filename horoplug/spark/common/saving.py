"""Saving of estimators and models in Spark ML's layout.

PATH/metadata is Spark's: the class, and the parameters with simple values, as JSON. PATH/contents is Parquet with one
row (name, format, content) for each other parameter. The format ``pickle`` is unpickled by ``load``: load only what you
trust."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import cloudpickle
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from horoplug.spark.common.errors import EstimatorError, StoreError, first_line
from horoplug.spark.common.work import pickled

Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
"""Functions from an object to bytes, and back."""

_SCHEMA: Final = "name string, format string, content binary"


def _is_simple(value: Any) -> bool:
    """Whether a value survives JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def unpickle(content: bytes) -> Any:
    return cloudpickle.loads(content)


class Saveable(MLWritable, MLReadable):  # type: ignore[misc]
    """Adds ``save``, ``write``, ``load`` and ``read`` to a class with parameters."""

    formats: ClassVar[Mapping[str, str]] = {}
    """The formats of parameters that are not pickled."""

    codecs: ClassVar[Mapping[str, Callable[[], Codec]]] = {}
    """The codec of each format."""

    def write(self) -> Any:
        """The object that writes: ``write().overwrite().save(path)``."""
        return _Writer(self)

    @classmethod
    def read(cls) -> Any:
        """The object that reads: ``read().load(path)``."""
        return _Reader(cls)


class _Writer(MLWriter):  # type: ignore[misc]
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write the object to an empty or missing folder. Raises EstimatorError for an object that cannot be pickled,
        StoreError for a folder that cannot be written."""
        instance, simple, rows = self._instance, {}, []
        together: dict[str, Any] = {}
        for param, value in instance._paramMap.items():
            kind = instance.formats.get(param.name)
            if kind is not None:
                encode, _ = instance.codecs[kind]()
                rows.append((param.name, kind, bytearray(encode(value))))
            elif _is_simple(value):
                simple[param.name] = value
            else:
                together[param.name] = value
        if together:  # an optimizer and its model share their parameters
            rows.append(("*", "pickle", bytearray(pickled(together))))
        try:
            DefaultParamsWriter.saveMetadata(instance, path, self.sc, paramMap=simple)
            frame = self.sparkSession.createDataFrame(rows, _SCHEMA)
            frame.coalesce(1).write.parquet(posixpath.join(path, "contents"))
        except Exception as error:  # py4j's or Spark's
            raise StoreError(
                f"cannot save to {path}: {first_line(error)} (write().overwrite() replaces what is there)"
            ) from error


class _Reader(MLReader):  # type: ignore[misc]
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        """Raises StoreError if nothing can be read there, EstimatorError for an object of another class."""
        try:
            metadata = DefaultParamsReader.loadMetadata(path, self.sc)
            rows = self.sparkSession.read.parquet(posixpath.join(path, "contents")).collect()
        except Exception as error:  # py4j's or Spark's
            raise StoreError(f"cannot load {path}: {first_line(error)}") from error
        own = f"{self._cls.__module__}.{self._cls.__name__}"
        if metadata["class"] != own:
            raise EstimatorError(f"{path} has a {metadata['class']}, not a {own}")
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        values = dict(metadata["paramMap"])
        for row in rows:
            if row.format == "pickle":
                values |= unpickle(bytes(row.content))
            else:
                _, decode = instance.codecs[row.format]()
                values[row.name] = decode(bytes(row.content))
        return instance.setParams(**values)
