"""A ``torch.nn.Module`` with its optimizer and loss as a LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from horoplug.numpy.metrics import MetricAverages, RowAverages
from horoplug.spark.torch.losses import Loss, Metrics, matched
from horoplug.spark.torch.tensors import Shapes, as_list


class PlainModule(LightningModule):  # type: ignore[misc]
    """Trains ``module``, whose outputs are compared with the label columns of each batch. It gives the columns their
    shapes itself, since one column can be a feature and a label."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        metrics: Metrics,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        sample_weight_col: str | None,
        input_shapes: Shapes,
        label_shapes: Shapes,
    ) -> None:
        super().__init__()
        self.module = module
        self._own_optimizer = optimizer
        self._loss = loss
        self._metrics_of = metrics
        self._averages = MetricAverages("TorchEstimator")
        self._others = {"": RowAverages(), "val_": RowAverages()}
        self._feature_cols = feature_cols
        self._label_cols = label_cols
        self._weight = sample_weight_col
        self._input_shapes = input_shapes
        self._label_shapes = label_shapes

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def _step(self, batch: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        features = _shaped([batch[name] for name in self._feature_cols], self._input_shapes)
        labels = _shaped([batch[name] for name in self._label_cols], self._label_shapes)
        outputs = as_list(self(*features))
        labels = matched(outputs, labels)
        rows = batch[self._weight].reshape(-1) if self._weight else None
        loss = self._loss(outputs, labels, rows)
        values = {"loss": loss.detach(), **self._metrics_of(outputs, labels)}
        named = {f"{prefix}{name}": value for name, value in values.items()}
        size = len(outputs[0])
        # Lightning logs numbers only.
        others = {name: v for name, v in named.items() if not isinstance(v, (float, torch.Tensor))}
        self._others[prefix].add(size, {name: named.pop(name) for name in others})
        self.log_dict(named, on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        return loss

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self._step(batch, "")

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self._step(batch, "val_")

    def epoch_averages(self) -> dict[str, Any]:
        """The averages of the epoch's metrics that are no numbers. Collective."""
        found: dict[str, Any] = {}
        for prefix, rows in self._others.items():
            found |= rows.of_all_ranks(self._averages)
            self._others[prefix] = RowAverages()
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._own_optimizer


def _shaped(values: list[torch.Tensor], shapes: Shapes) -> list[torch.Tensor]:
    if shapes is None:
        return values
    return [v.reshape(len(v), *list(s)[1:]) for v, s in zip(values, shapes, strict=True)]
