"""The updates of PyTorch's optimizers, for states that are kept in place (:mod:`horoplug.common.progress`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from horoplug.common.context import context
from horoplug.common.progress import Progress
from horoplug.torch.plain import as_bytes, plain


class TorchProgress(Progress):
    """Counts the steps of optimizers."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._on_step)

    @staticmethod
    def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        check_reductions(p for group in optimizer.param_groups for p in group["params"])

    def _on_step(self, *_: object) -> None:
        self._begun += 1
        self._ended += 1


def check_reductions(parameters: Iterable[torch.Tensor]) -> None:
    """Raise HorovodInternalError if the job has failed, so that reductions of gradients on a GPU may be wrong.

    An operation on GPU tensors is done for the host when all of its work is in a stream. If the job fails later, the
    next operation raises the error, after steps with wrong gradients may have been enqueued. On a CPU, an operation
    that returns is right."""
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    if devices:
        context.check_running()


def checksum(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A checksum of the bits of each tensor, which is computed where the tensor is."""
    return [_checksum(tensor.detach()) for tensor in tensors]


def _checksum(tensor: torch.Tensor) -> int:
    data = as_bytes(plain(tensor))
    whole = data.numel() // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Multiplied with odd numbers that depend on the place, so that exchanged elements are noticed. Sums wrap around.
    for part in (words, rest):
        places = torch.arange(part.numel(), dtype=torch.int64, device=tensor.device)
        total = total * 31 + (part * (2 * places + 1)).sum()
    return int(total)
