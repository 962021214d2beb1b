"""Training of :class:`horoplug.spark.torch.TorchEstimator` on the ranks."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

import horoplug.torch as hvd
from horoplug.numpy.metrics import MetricAverages, RowAverages, line
from horoplug.spark.common.errors import needed
from horoplug.spark.common.predicting import described
from horoplug.spark.common.reading import Block, Reader
from horoplug.spark.common.work import Outcome, Work
from horoplug.spark.torch.losses import Loss, Metrics, matched
from horoplug.spark.torch.tensors import as_list, float_dtype, tensors


def train(work: Work) -> Outcome | None:
    """Train on this rank. Returns a result on rank 0."""
    hvd.init()
    try:
        return _Training(work).run()
    finally:
        hvd.shutdown()


class _Training:
    """The model of one rank and its data."""

    def __init__(self, work: Work) -> None:
        self._work = work
        options, objects = work.options, work.objects()
        self._options = options
        _seed(options["random_seed"], hvd.rank())
        self._device = _device(options["use_gpu"])
        self._model: torch.nn.Module = objects["model"].to(self._device)
        self._dtype = float_dtype(self._model)
        labels = options["label_cols"]
        weighted = bool(options["sample_weight_col"])
        self._loss = Loss(objects["loss"], options["loss_weights"], len(labels), weighted)
        self._metrics = Metrics(objects["metrics"], labels)
        self._averages = MetricAverages("TorchEstimator")
        self._callbacks = objects["callbacks"] or []
        self._outputs: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self._passes = 0  # backward passes since the last step
        self._resume(objects["optimizer"])
        self._optimizer = self._distribute(objects["optimizer"], objects["gradient_compression"])
        rank, size, transform = hvd.rank(), hvd.size(), objects["transformation_fn"]
        self._train_reader = work.train_reader(rank, size, transform)
        self._val_reader = work.val_reader(rank, size, transform, even=False)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome | None:
        first = len(self.history)
        start = self._work.first_pass(self._train_reader, first)
        batches = self._train_reader.stream(start)
        self._call("on_train_begin", {})
        for epoch in range(first, self._options["epochs"]):
            self._call("on_epoch_begin", epoch, {})
            entry = {"epoch": epoch, "train": self._train_epoch(batches, epoch)}
            if self._val_reader is not None:
                entry["validation"] = self._validate(self._val_reader)
            self.history.append(entry)
            self._report(entry)
            self._save()
            self._call("on_epoch_end", epoch, _flat(entry))
        self._call("on_train_end", {})
        if hvd.rank() != 0:
            return None
        return Outcome(self.history, _bytes(_on_cpu(self._model.state_dict())), self._outputs)

    def _train_epoch(self, batches: Iterator[Block], epoch: int) -> dict[str, Any]:
        self._model.train()
        steps, sums = self._work.train_steps(self._train_reader), RowAverages()
        with self._progress(steps, epoch) as numbers:
            for number in numbers:
                block = next(batches)
                rows, loss, values = self._forward(block)
                if self._passes == 0:
                    self._optimizer.zero_grad()
                torch.autograd.backward(loss)
                self._passes += 1
                if self._passes == self._options["backward_passes_per_step"]:
                    self._optimizer.step()
                    self._passes = 0
                sums.add(rows, {"loss": float(loss.detach()), **values})
                self._call("on_batch_end", number, values)
        return sums.of_all_ranks(self._averages)

    def _validate(self, reader: Reader) -> dict[str, Any]:
        self._model.eval()
        steps, sums = self._work.val_steps(reader), RowAverages()
        with torch.no_grad():
            for _, block in zip(range(steps), reader.one_pass(), strict=False):
                rows, loss, values = self._forward(block)
                sums.add(rows, {"loss": float(loss), **values})
        # A rank without rows has the same names.
        return sums.of_all_ranks(self._averages, self.history_names())

    def history_names(self) -> list[str]:
        return ["loss", *(name for name, _, _ in self._metrics._parts)]

    def _forward(self, block: Block) -> tuple[int, torch.Tensor, dict[str, Any]]:
        """The number of rows, the loss and the metrics of a batch."""
        options = self._options
        features = self._tensors(block, options["feature_cols"], options.get("input_shapes"))
        labels = self._tensors(block, options["label_cols"], options["label_shapes"])
        weight = options["sample_weight_col"]
        rows = self._tensors(block, [weight], None)[0].reshape(-1) if weight else None
        outputs = as_list(self._model(*features))
        labels = matched(outputs, labels)
        loss = self._loss(outputs, labels, rows)
        with torch.no_grad():
            values = self._metrics([output.detach() for output in outputs], labels)
        if not self._outputs:
            self._outputs = described([output.detach().cpu().numpy() for output in outputs])
        return len(features[0]), loss, values

    def _tensors(self, block: Block, names: Iterable[str], shapes: Any) -> list[torch.Tensor]:
        return tensors([block[name] for name in names], shapes, self._dtype, self._device)

    # ---- start and checkpoints ---------------------------------------------------------------------------------------

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the last checkpoint on rank 0, and give all ranks its state."""
        if hvd.rank() == 0 and (content := self._work.checkpoint()) is not None:
            state = torch.load(io.BytesIO(content), weights_only=True, map_location=self._device)
            self._model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            self.history = state["history"]
        self.history = hvd.broadcast_object(self.history, 0)
        hvd.broadcast_parameters(self._model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)

    def _distribute(self, optimizer: torch.optim.Optimizer, compression: Any) -> Any:
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, p) for name, p in self._model.named_parameters() if p in own]
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            compression=compression or hvd.Compression.none,
            backward_passes_per_step=self._options["backward_passes_per_step"],
        )

    def _save(self) -> None:
        if hvd.rank() == 0:
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            self._work.save_checkpoint(_bytes({**state, "history": self.history}))

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is not None:
                function(*args)

    @contextlib.contextmanager
    def _progress(self, steps: int, epoch: int) -> Iterator[Iterable[int]]:
        if self._options["verbose"] < 2 or hvd.rank() != 0:
            yield range(steps)
            return
        text = f"epoch {epoch + 1}/{self._options['epochs']}"
        with needed("tqdm").tqdm(range(steps), text, unit="batch") as bar:
            yield bar

    def _report(self, entry: dict[str, Any]) -> None:
        if self._options["verbose"] and hvd.rank() == 0:
            text = line(_flat(entry))
            print(f"epoch {entry['epoch'] + 1}/{self._options['epochs']}: {text}", flush=True)


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    """Metrics by the names that callbacks know: those of the validation begin with ``val_``."""
    validation = entry.get("validation", {})
    return {**entry["train"], **{f"val_{name}": value for name, value in validation.items()}}


def _seed(seed: int | None, rank: int) -> None:
    """Seed all generators; each rank drops out other units."""
    if seed is not None:
        random.seed(seed + rank)
        np.random.seed((seed + rank) % 2**32)
        torch.manual_seed(seed + rank)


def _device(use_gpu: bool) -> torch.device:
    if not (use_gpu and torch.cuda.is_available()):
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
