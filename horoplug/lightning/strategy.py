"""``HorovodStrategy``: data-parallel training with Lightning's Trainer."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy

import horoplug.torch as hvd
from horoplug.lightning import schedules
from horoplug.lightning.environment import HorovodEnvironment
from horoplug.lightning.job import JobMixin

_Strategy: Any = object  # stands for the ParallelStrategy, whose attributes the class uses


class StrategyMixin(JobMixin, _Strategy):  # type: ignore[misc]
    """What ``HorovodStrategy`` adds to a ``ParallelStrategy``, which the packages lightning and pytorch_lightning both
    have."""

    strategy_name = "horovod"
    model: Any
    optimizers: Any

    def __init__(
        self,
        *,
        scale_lr: bool = True,
        optimizer_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        options.setdefault("cluster_environment", HorovodEnvironment())
        super().__init__(**options)
        self._scale_lr = scale_lr
        self._optimizer_options = optimizer_options or {}

    def setup(self, trainer: Any) -> None:
        """Called before fit, validate, test and predict."""
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True)
            self.model = hvd.SyncBatchNorm.convert_sync_batchnorm(self.model)
        super().setup(trainer)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        self._broadcast_module(model)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        self._unwrap_all()
        super().setup_optimizers(trainer)
        wrapped = []
        for optimizer in self.optimizers:
            schedulers = [
                config.scheduler
                for config in self.lr_scheduler_configs
                if config.scheduler.optimizer is optimizer
            ]
            if self._scale_lr:
                schedules.scale(optimizer, schedulers, hvd.size())
            named = self.lightning_module.named_parameters()
            wrapped.append(self._wrap(optimizer, named, self._optimizer_options))
            schedules.redirect(schedulers, wrapped[-1])
        self.optimizers = wrapped

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        self._synchronize()

    def optimizer_step(
        self, optimizer: Any, closure: Any, model: Any = None, **options: Any
    ) -> Any:
        with self._stepping(optimizer):
            return super().optimizer_step(optimizer, closure, model, **options)

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context in which backward passes only add to the gradients of this rank: gradient accumulation."""
        return self._no_sync()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)


class HorovodStrategy(StrategyMixin, ParallelStrategy):  # type: ignore[misc]
    """Train with one process per rank, which ``horovodrun`` or another launcher of :func:`horoplug.torch.init` starts.

    ``Trainer(strategy="horovod")`` after ``import horoplug.lightning`` creates it without arguments.

    scale_lr: multiply the learning rates of ``configure_optimizers``, and of its schedulers, by the number of ranks,
        as the strategy of Lightning 1 did. A checkpoint contains the scaled rates.
    optimizer_options: further arguments of :func:`horoplug.torch.DistributedOptimizer`, such as ``compression``.
    options: arguments of every strategy: accelerator, parallel_devices, cluster_environment, checkpoint_io,
        precision_plugin.

    Creating it joins the job, and raises the exceptions of ``hvd.init``.

    Example, on two ranks:

        import lightning
        from horoplug.lightning import HorovodStrategy

        class Net(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1, bias=False)
                torch.nn.init.ones_(self.layer.weight)

            def training_step(self, batch):
                return self.layer(batch).sum()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.25)

        model = Net()
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy=HorovodStrategy(scale_lr=False),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.DataLoader(torch.tensor([[2.0], [2.0]]))  # a batch for each rank
        trainer.fit(model, data)
        model.layer.weight.detach()  # -> [[0.5]]
    """
