"""Training of :class:`horoplug.spark.keras.KerasEstimator` on the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras

import horoplug
import horoplug.keras as hvd
from horoplug.numpy.metrics import plain
from horoplug.spark.common.reading import Block
from horoplug.spark.common.work import Outcome, Work
from horoplug.spark.keras.arrays import inputs_of, labels_of, single
from horoplug.spark.keras.serialization import (
    checkpoint_bytes,
    load_checkpoint,
    model_from_bytes,
    restored,
    weights_bytes,
)


def train(work: Work) -> Outcome | None:
    """Train on this rank. Returns a result on rank 0."""
    hvd.init()
    try:
        return _train(work)
    finally:
        hvd.shutdown()


def _train(work: Work) -> Outcome | None:
    options, objects = work.options, work.objects()
    if options["random_seed"] is not None:
        keras.utils.set_random_seed((options["random_seed"] + hvd.rank()) % 2**32)
    model = _compiled(objects, options)
    # Rank 0 has read the last checkpoint for all.
    content = horoplug.broadcast_object(work.checkpoint() if hvd.rank() == 0 else None, 0)
    before = load_checkpoint(model, content) if content is not None else {}
    first = max(map(len, before.values()), default=0)
    rank, size, transform = hvd.rank(), hvd.size(), objects["transformation_fn"]
    train_reader = work.train_reader(rank, size, transform)
    val_reader = work.val_reader(rank, size, transform, even=True)
    validation: dict[str, Any] = {}
    if val_reader is not None:
        steps = work.val_steps(val_reader)
        # Each validation has the same rows.
        passes = (itertools.islice(val_reader.one_pass(), steps) for _ in itertools.count())
        blocks = itertools.chain.from_iterable(passes)
        validation = {
            "validation_data": _batches(model, blocks, options),
            "validation_steps": steps,
        }
    recorder = _Recorder(work, before)
    own = [hvd.callbacks.MetricAverageCallback(), recorder]
    more = [
        *(objects["callbacks"] or ()),
        *([cb] if (cb := objects["checkpoint_callback"]) else ()),
    ]
    if first < options["epochs"]:
        model.fit(
            _batches(model, train_reader.stream(work.first_pass(train_reader, first)), options),
            steps_per_epoch=work.train_steps(train_reader),
            initial_epoch=first,
            epochs=options["epochs"],
            callbacks=[*own, *more],
            verbose=options["verbose"] if rank == 0 else 0,
            **validation,
        )
    return Outcome(recorder.history, weights_bytes(model), []) if rank == 0 else None


def _compiled(objects: dict[str, Any], options: Any) -> Any:
    """The model with a DistributedOptimizer."""
    custom = objects["custom_objects"]
    model = model_from_bytes(objects["model"], custom, trusted=True)
    optimizer = hvd.DistributedOptimizer(
        restored(objects["optimizer"], custom),
        compression=objects["gradient_compression"] or hvd.Compression.none,
        backward_passes_per_step=options["backward_passes_per_step"],
    )
    model.compile(
        optimizer=optimizer,
        loss=restored(objects["loss"], custom),
        loss_weights=options["loss_weights"],
        metrics=restored(objects["metrics"], custom),
    )
    return model


def _batches(model: Any, blocks: Iterator[Block], options: Any) -> Iterator[Any]:
    """Tuples of inputs, labels and, if there is a column for them, weights."""
    features, labels = options["feature_cols"], options["label_cols"]
    weight = options["sample_weight_col"]
    for block in blocks:
        inputs = single(inputs_of(model, [block[name] for name in features]))
        targets = labels_of(model, [block[name] for name in labels], options["label_shapes"])
        if not weight:
            yield inputs, single(targets)
            continue
        weights = block[weight].reshape(-1).astype(keras.config.floatx())
        yield inputs, single(targets), single([weights] * len(targets))


class _Recorder(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the averages over all ranks, and saves a checkpoint after each epoch on rank 0."""

    def __init__(self, work: Work, history: dict[str, list[Any]]) -> None:
        super().__init__()
        self._work = work
        self.history = {name: list(values) for name, values in history.items()}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name, value in (logs or {}).items():
            if (numbers := plain(value)) is not None:
                self.history.setdefault(name, []).append(numbers)
        if hvd.rank() == 0 and self._work.store.saving_runs():
            self._work.save_checkpoint(checkpoint_bytes(self.model, self.history))
