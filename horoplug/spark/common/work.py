"""What an estimator sends to its ranks, and what rank 0 sends back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from horoplug.base.pickling import find_unpicklable
from horoplug.spark.common.columns import Column, Metadata
from horoplug.spark.common.errors import EstimatorError, first_line
from horoplug.spark.common.reading import Reader, RowGroups
from horoplug.spark.common.store import Store


@dataclasses.dataclass(frozen=True)
class Work:
    """A training for :meth:`horoplug.spark.common.backend.Backend.run`.

    ``options``: the estimator's parameters with simple values; ``payload``: the others, pickled by
    :func:`pickled`."""

    store: Store
    data_idx: int | str | None
    run_id: str
    metadata: Metadata
    options: Mapping[str, Any]
    payload: bytes
    suffix: str
    """The end of the name of the checkpoint."""

    def objects(self) -> dict[str, Any]:
        """The unpickled objects by name. A rank gets them from the driver by Spark's authenticated connections."""
        values: dict[str, Any] = cloudpickle.loads(self.payload)
        return values

    # ---- data --------------------------------------------------------------------------------------------------------

    def columns(self) -> list[Column]:
        names = [*self.options["feature_cols"], *self.options["label_cols"]]
        weight = self.options["sample_weight_col"]
        names += [weight] if weight else []
        return [self.metadata.column(name) for name in dict.fromkeys(names)]

    def train_reader(self, rank: int, size: int, transform: Callable[[Any], Any] | None) -> Reader:
        """Batches for training: the same number on all ranks."""
        path = self.store.get_train_data_path(self.data_idx)
        return self._reader(path, rank, size, transform, "train", even=True)

    def val_reader(
        self, rank: int, size: int, transform: Callable[[Any], Any] | None, even: bool
    ) -> Reader | None:
        """Batches for validation; None without validation data. ``even``: see :class:`Reader`."""
        if not self.metadata.val_rows:
            return None
        path = self.store.get_val_data_path(self.data_idx)
        return self._reader(path, rank, size, transform, "val", even=even)

    def _reader(
        self,
        path: str,
        rank: int,
        size: int,
        transform: Callable[[Any], Any] | None,
        part: str,
        even: bool,
    ) -> Reader:
        options, train = self.options, part == "train"
        threads = options["reader_pool_type"] != "dummy"
        return Reader(
            RowGroups(self.store, path, self.columns(), transform),
            rank,
            size,
            options["batch_size"] if train else options["val_batch_size"] or options["batch_size"],
            even=even,
            shuffle=train and options["shuffle"],
            seed=options["random_seed"],
            buffer=options["shuffle_buffer_size"],
            workers=options[f"{part}_reader_num_workers"] if threads else 0,
            cache=options["inmemory_cache_all"],
        )

    def train_steps(self, reader: Reader) -> int:
        """Batches of an epoch."""
        return int(self.options["train_steps_per_epoch"] or reader.steps)

    def val_steps(self, reader: Reader) -> int:
        """Batches of a validation."""
        limit = self.options["validation_steps_per_epoch"]
        return min(int(limit), reader.steps) if limit else reader.steps

    def first_pass(self, reader: Reader, epoch: int) -> int:
        """The pass over the data with which an epoch begins, if training begins with this epoch."""
        return epoch * self.train_steps(reader) // reader.steps

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_path(self) -> str:
        return self.store.get_checkpoint_path(self.run_id) + self.suffix

    def checkpoint(self) -> bytes | None:
        """The last checkpoint of the run, or None."""
        exists = self.store.saving_runs() and self.store.exists(self.checkpoint_path)
        return self.store.read(self.checkpoint_path) if exists else None

    def save_checkpoint(self, content: bytes) -> None:
        if self.store.saving_runs():
            self.store.write(self.checkpoint_path, content)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of rank 0. ``state``: the trained parameters as the framework stores them; ``outputs``: dtype and
    shape of each output for one row, empty if no batch was computed."""

    history: Any
    state: bytes
    outputs: list[dict[str, Any]]


def pickled(objects: Mapping[str, Any]) -> bytes:
    """Pickle objects together, so that an optimizer keeps the parameters of its model. Raises EstimatorError that names
    the object that cannot be pickled."""
    try:
        return bytes(cloudpickle.dumps(dict(objects)))
    except Exception as error:  # whatever __reduce__ raises
        for name, value in objects.items():
            if (found := find_unpicklable(value, name)) is not None:
                raise EstimatorError(
                    f"{name}: {type(value).__name__} cannot be pickled and sent to the executors: {found}"
                ) from error
        raise EstimatorError(
            f"the model and its optimizer cannot be pickled: {first_line(error)}"
        ) from error
