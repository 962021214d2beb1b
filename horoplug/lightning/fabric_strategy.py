"""``HorovodFabricStrategy``: data-parallel training with Lightning's Fabric."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ParallelStrategy
from packaging.version import Version

from horoplug.lightning import schedules
from horoplug.lightning.environment import HorovodEnvironment
from horoplug.lightning.job import JobMixin


class HorovodFabricStrategy(JobMixin, ParallelStrategy):  # type: ignore[misc]
    """Train with one process per rank, which ``horovodrun`` or another launcher of :func:`horoplug.torch.init` starts.

    ``Fabric(strategy="horovod")`` after ``import horoplug.lightning`` creates it without arguments. The module has to
    be set up before its optimizers, or together with them.

    ``optimizer_options``: further arguments of :func:`horoplug.torch.DistributedOptimizer`, such as ``compression``.
    options: arguments of every strategy: accelerator, parallel_devices, cluster_environment, checkpoint_io, precision.

    Creating it joins the job, and raises the exceptions of ``hvd.init``.

    Example, on two ranks:

        import lightning
        from horoplug.lightning import HorovodFabricStrategy

        fabric = lightning.Fabric(accelerator="cpu", strategy=HorovodFabricStrategy())
        fabric.launch()
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.25))
        fabric.backward(model(torch.tensor([[4.0 * fabric.global_rank]])).sum())  # the gradients are 0 and 4
        optimizer.step()
        model.weight.detach()  # -> [[0.5]]
    """

    def __init__(self, *, optimizer_options: dict[str, Any] | None = None, **options: Any) -> None:
        if Version(lightning.__version__) < Version("2.1"):
            # Fabric does not ask the strategy for backward, at whose end the gradients would be reduced.
            raise ImportError(
                f"Fabric with horoplug needs Lightning 2.1 or later, and this is {lightning.__version__}: pip install "
                "'horoplug[lightning]'"
            )
        options.setdefault("cluster_environment", HorovodEnvironment())
        super().__init__(**options)
        self._optimizer_options = optimizer_options or {}
        self._backward_sync_control = _SyncControl(self)
        self._names: list[tuple[str, Any]] = []

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._broadcast_module(module)
        # Two modules may have parameters of the same name.
        prefix = f"{len(self._names)}." if self._names else ""
        self._names += [(prefix + name, p) for name, p in module.named_parameters()]
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        return self._wrap(optimizer, self._names, self._optimizer_options)

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], *scheduler: Any
    ) -> Any:
        """``scheduler``: None or a scheduler, which the first versions of Lightning 2 neither pass nor get back."""
        before = getattr(scheduler[0], "optimizer", None) if scheduler else None
        result = super().setup_module_and_optimizers(module, optimizers, *scheduler)
        for old, new in zip(optimizers, result[1], strict=True):
            if old is before:
                schedules.redirect([result[2]], new)
        return result

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **options: Any) -> None:
        super().backward(tensor, module, *args, **options)
        self._synchronize()

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        with self._stepping(optimizer):
            return super().optimizer_step(optimizer, **options)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)


class _SyncControl:
    """Implements ``fabric.no_backward_sync``."""

    def __init__(self, strategy: HorovodFabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(
        self, module: Any, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        return self._strategy._no_sync() if enabled else contextlib.nullcontext()
