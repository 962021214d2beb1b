"""Batch normalization over the batches of all ranks.

The forward pass and the backward pass each exchange a few numbers per channel. The batches of the ranks may have
different sizes and may be empty.
"""

import math
import weakref
from typing import Any, TypeVar, cast, overload

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from horoplug.common.context import context
from horoplug.common.per_job import FirstUses, PerJob
from horoplug.common.process_sets import ProcessSet, global_process_set, process_set_id
from horoplug.common.reduce_ops import Sum
from horoplug.torch.dynamo import run_eagerly
from horoplug.torch.operations import allgather, allreduce

Module = TypeVar("Module", bound=torch.nn.Module)


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d/2d/3d`` that uses the mean and variance over the batches of all ranks in training.

    Takes floating-point input of shape (N, C, ...); statistics are float32, or float64 for float64 input. In
    evaluation, on one rank, and on ranks outside of the process set it is plain batch normalization. The gradients of
    weight and bias are those of this rank's batch: the optimizer reduces them like all others.

    Every rank uses the same layers in the same order. Raises ValueError for input of another shape, or if all batches
    together have fewer than two values per channel.

    ``process_set``: the ranks whose batches are used; by default all. The other arguments, ``num_features``, ``eps``,
    ``momentum``, ``affine`` and ``track_running_stats``, are those of ``torch.nn.BatchNorm2d``.

    Example, on two ranks:

        layer = hvd.SyncBatchNorm(1, affine=False)
        x = torch.tensor([[4.0 * hvd.rank()]])  # one value on each rank; the mean is 2, the deviation 2
        layer(x).round(decimals=3)  # -> [[-1.0]] on rank 0, [[1.0]] on rank 1
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        type(model[1]).__name__  # -> "SyncBatchNorm"
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @overload
    @classmethod
    def convert_sync_batchnorm(
        cls, module: _BatchNorm, process_set: ProcessSet = ...
    ) -> "SyncBatchNorm": ...

    @overload
    @classmethod
    def convert_sync_batchnorm(cls, module: Module, process_set: ProcessSet = ...) -> Module: ...

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every batch normalization in the module by a layer of this class with the same parameters and
        statistics, and return the module. A layer that occurs twice is replaced by one layer."""
        return cls._convert(module, process_set, {})

    @classmethod
    def _convert(
        cls,
        module: torch.nn.Module,
        process_set: ProcessSet,
        converted: dict[torch.nn.Module, torch.nn.Module],
    ) -> torch.nn.Module:
        if module in converted:
            return converted[module]
        made = module
        if isinstance(module, _BatchNorm):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            made.train(module.training)
            # The same parameter objects, since an optimizer may have them already.
            made._parameters.update(module._parameters)
            made._buffers.update(module._buffers)
        converted[module] = made
        for name, child in module._modules.items():
            if child is not None:
                made._modules[name] = cls._convert(child, process_set, converted)
        return made

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"expected {self.num_features} channels in dimension 1, got input of shape {tuple(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized input, with its shape and dtype."""
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return super().forward(input)
        context.connections()  # raises before init
        if self.process_set.size() == 1 or not self.process_set.included():
            return super().forward(input)
        return self._synchronized(input)

    @run_eagerly
    def _synchronized(self, input: torch.Tensor) -> torch.Tensor:
        exchange = _Exchange(self, self.process_set)
        normalize: Any = _Normalization.apply
        output, mean, variance, count = normalize(input, self.weight, self.bias, self.eps, exchange)
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return cast(torch.Tensor, output)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        layer: Any = self  # has the buffers, since it tracks statistics
        layer.num_batches_tracked.add_(1)
        # Without momentum, the statistics are the average of all batches so far.
        share = 1 / float(layer.num_batches_tracked) if self.momentum is None else self.momentum
        for running, current in ((layer.running_mean, mean), (layer.running_var, variance)):
            running.lerp_(current.to(running.dtype), share)


class _Exchange:
    """The communication of one use of a layer. Uses whose backward passes may overlap have different names."""

    def __init__(self, layer: SyncBatchNorm, process_set: ProcessSet) -> None:
        self.process_set = process_set
        number = _LAYERS.get().number(layer, process_set_id(process_set))
        self._name = f"sync_batch_norm.{number}"
        uses = _USES.get()
        if layer not in uses:
            uses[layer] = weakref.WeakValueDictionary()
        self._uses = uses[layer]

    def gather(self, count: int, *numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather from all ranks: the number of values, in host memory, and the concatenated vectors as the rows of a
        matrix."""
        # A rank frees the number of a use when it drops the graph, so the ranks agree on a number that is free on all.
        free = max(self._uses, default=-1) + 1
        row = torch.tensor([free, count], dtype=torch.float64)
        wide = [vector.double() for vector in numbers]
        if numbers[0].is_cpu:
            rows = allgather(torch.cat([row, *wide])[None], self._name, self.process_set)
            counts, rows = rows[:, :2], rows[:, 2:]
        else:  # two operations, so that no rank has to wait for the GPU
            counts = allgather(row[None], f"{self._name}.counts", self.process_set)
            rows = allgather(torch.cat(wide)[None], self._name, self.process_set)
        self._use = int(counts[:, 0].max())
        self._uses[self._use] = self
        return counts[:, 1:], rows

    def sum(self, *numbers: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of vectors of one length, as the rows of a matrix."""
        name = f"{self._name}.{self._use}.gradient"
        rows = torch.stack([vector.double() for vector in numbers])
        return allreduce(rows, name=name, op=Sum, process_set=self.process_set)


_LAYERS = PerJob(FirstUses)
_USES = PerJob(
    weakref.WeakKeyDictionary[SyncBatchNorm, "weakref.WeakValueDictionary[int, _Exchange]"]
)
"""By layer: its uses whose backward passes may overlap, by number."""


class _Normalization(torch.autograd.Function):
    """Returns the normalized input, the mean and the (biased) variance over all batches, and the number of values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        exchange: _Exchange,
    ) -> tuple[torch.Tensor, ...]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        others = [dim for dim in range(x.dim()) if dim != 1]
        number = math.prod(x.shape[dim] for dim in others)
        if number:
            variance, mean = torch.var_mean(wide, others, correction=0)
        else:
            variance = mean = wide.new_zeros(x.shape[1])
        counts, rows = exchange.gather(number, mean, variance)
        means, variances = rows.chunk(2, dim=1)
        count = counts.sum()
        if count < 2:
            raise ValueError(
                "training needs more than one value per channel on all ranks together, got input of shape "
                f"{tuple(x.shape)}"
            )
        counts = counts.to(means.device)
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        scale = (variance + eps).rsqrt()

        ctx.exchange = exchange
        ctx.count = count
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.mark_non_differentiable(mean, variance, count)
        output = wide - _along(mean, wide)
        output *= _along(scale if weight is None else scale * weight, wide)
        if bias is not None:
            output += _along(bias, wide)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        wide_type = torch.promote_types(x.dtype, torch.float32)
        others = [dim for dim in range(x.dim()) if dim != 1]
        grad = grad.to(wide_type)
        normal = (x.to(wide_type) - _along(mean, grad)).mul_(_along(scale, grad))
        sum_grad = grad.sum(others)
        sum_product = (grad * normal).sum(others)
        grad_x = None
        if ctx.needs_input_grad[0]:
            totals = ctx.exchange.sum(sum_grad, sum_product) / ctx.count
            grad_x = grad - _along(totals[0], grad) - normal.mul_(_along(totals[1], grad))
            grad_x *= _along(scale if weight is None else scale * weight, grad)
        # Autograd casts them.
        grad_weight = sum_product if ctx.needs_input_grad[1] else None
        grad_bias = sum_grad if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _along(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number per channel, in a shape that broadcasts with ``like`` and its dtype."""
    return numbers.to(like.dtype).view(-1, *[1] * (like.dim() - 2))
