"""Training of :class:`horoplug.spark.lightning.TorchEstimator` on the ranks."""

from __future__ import annotations

import inspect
import io
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import horoplug.torch as hvd
from horoplug.lightning.strategy import StrategyMixin
from horoplug.numpy.metrics import MetricAverages, line, plain
from horoplug.spark.common.columns import reshape
from horoplug.spark.common.reading import Block, Reader
from horoplug.spark.common.work import Outcome, Work
from horoplug.spark.lightning.package import package_of
from horoplug.spark.lightning.plain import PlainModule
from horoplug.spark.torch.tensors import float_dtype, tensor


def train(work: Work) -> Outcome | None:
    """Train on this rank. Returns a result on rank 0."""
    hvd.init()
    try:
        with tempfile.TemporaryDirectory(prefix="horoplug-") as folder:
            return _train(work, Path(folder))
    finally:
        hvd.shutdown()


def _train(work: Work, folder: Path) -> Outcome | None:
    options, objects = work.options, work.objects()
    module = objects["model"]
    package = package_of(module)
    if options["random_seed"] is not None:
        package.seed_everything(options["random_seed"] + hvd.rank(), verbose=False)
    if not options["verbose"]:
        logging.getLogger(package.__name__).setLevel(logging.WARNING)
    recorder = type("Recorder", (_Recorder, package.Callback), {})(work, folder)
    strategy = type("HorovodStrategy", (StrategyMixin, package.strategies.ParallelStrategy), {})
    trainer = package.Trainer(
        **{
            **_arguments(work, objects, folder, strategy),
            "callbacks": [*(objects["callbacks"] or ()), recorder],
        }
    )
    rank, size, transform = hvd.rank(), hvd.size(), objects["transformation_fn"]
    convert = _Converter(options, float_dtype(module), not isinstance(module, PlainModule))
    reader = work.train_reader(rank, size, transform)
    loaders: dict[str, Any] = {"train_dataloaders": _TrainLoader(work, reader, convert, trainer)}
    val_reader = work.val_reader(rank, size, transform, even=True)
    if val_reader is not None:
        loaders["val_dataloaders"] = _ValLoader(work.val_steps(val_reader), val_reader, convert)
    # Rank 0 has read the last checkpoint for all.
    content = hvd.broadcast_object(work.checkpoint() if rank == 0 else None, 0)
    if content is not None:
        path = folder / "resumed.ckpt"
        path.write_bytes(content)
        loaders["ckpt_path"] = str(path)
        if "weights_only" in inspect.signature(trainer.fit).parameters:
            loaders["weights_only"] = True  # nothing else is unpickled
    trainer.fit(module, **loaders)
    if rank != 0:
        return None
    buffer = io.BytesIO()
    torch.save({name: value.cpu() for name, value in module.state_dict().items()}, buffer)
    return Outcome(recorder.history, buffer.getvalue(), [])


def _arguments(
    work: Work, objects: dict[str, Any], folder: Path, strategy: type[Any]
) -> dict[str, Any]:
    """The arguments of the Trainer."""
    options = work.options
    gpu = options["use_gpu"] and torch.cuda.is_available()
    compression = objects["gradient_compression"] or hvd.Compression.none
    return {
        "accelerator": "gpu" if gpu else "cpu",
        "strategy": strategy(optimizer_options={"compression": compression}),
        "max_epochs": options["epochs"],
        "logger": objects["logger"] or False,
        "log_every_n_steps": options["log_every_n_steps"],
        "accumulate_grad_batches": options["backward_passes_per_step"],
        "enable_progress_bar": options["verbose"] >= 2,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "profiler": objects["profiler"],
        "default_root_dir": str(folder),
        **(objects["trainer_args"] or {}),
    }


class _Converter:
    """Makes a dictionary of tensors, by column, of a batch. ``has_shapes``: whether they get their shapes here."""

    def __init__(self, options: Any, dtype: torch.dtype, has_shapes: bool) -> None:
        self._dtype = dtype
        self._shapes: dict[str, Any] = {}
        if not has_shapes:
            return
        for names, shapes in (
            (options["label_cols"], options["label_shapes"]),
            (options["feature_cols"], options["input_shapes"]),
        ):
            self._shapes |= dict(zip(names, shapes or [None] * len(names), strict=True))

    def __call__(self, block: Block) -> dict[str, torch.Tensor]:
        return {
            name: tensor(reshape(array, self._shapes.get(name)), self._dtype)
            for name, array in block.items()
        }


class _TrainLoader:
    """One epoch after the other of a rank's batches, beginning with the epoch that is resumed."""

    def __init__(self, work: Work, reader: Reader, convert: _Converter, trainer: Any) -> None:
        self._work = work
        self._reader = reader
        self._convert = convert
        self._trainer = trainer
        self._stream: Iterator[Block] | None = None

    def __len__(self) -> int:
        return self._work.train_steps(self._reader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._stream is None:
            first = self._work.first_pass(self._reader, self._trainer.current_epoch)
            self._stream = self._reader.stream(first)
        return map(self._convert, itertools.islice(self._stream, len(self)))


class _ValLoader:
    """The same batches in each validation."""

    def __init__(self, steps: int, reader: Reader, convert: _Converter) -> None:
        self._steps = steps
        self._reader = reader
        self._convert = convert

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self._convert, itertools.islice(self._reader.one_pass(), self._steps))


class _Recorder:
    """Keeps what the module has logged for each epoch, and saves a checkpoint after it. For a ``Callback``."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work = work
        self._folder = folder
        self._averages = MetricAverages("TorchEstimator")
        self.history: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if self._work.options["terminate_on_nan"] and outputs is not None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            if not torch.isfinite(loss):
                raise ValueError(f"the loss of batch {index} of rank {hvd.rank()} is {float(loss)}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        logged = {name: plain(value) for name, value in trainer.callback_metrics.items()}
        values = {name: value for name, value in logged.items() if isinstance(value, float | int)}
        # Lightning does not reduce them, unless the metric does so itself; then they are the same everywhere.
        arrays = {name: value for name, value in logged.items() if isinstance(value, list)}
        values |= {name: plain(value) for name, value in self._averages(arrays).items()}
        if isinstance(module, PlainModule):
            values |= module.epoch_averages()
        self.history.append({"epoch": trainer.current_epoch, **values})
        if self._work.options["verbose"] and hvd.rank() == 0:
            head = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            print(f"{head}: {line(values)}", flush=True)
        if self._work.store.saving_runs():
            path = self._folder / "saved.ckpt"
            trainer.save_checkpoint(path)  # collective
            if hvd.rank() == 0:
                self._work.save_checkpoint(path.read_bytes())

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = list(state["history"])
