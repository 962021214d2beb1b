"""How far the processes of a job are that go on with their parameters after a failure, without returning to a commit.

Parameters change only inside ``optimizer.step()``, after all reductions of that step. So a process that has survived a
failure has the parameters of a whole step. A failure can still end a step on some processes and not on others; these
then differ by one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from horoplug.common.context import context
from horoplug.torch.functions import allgather_object


class Source(NamedTuple):
    """Where the processes get their state from.

    ``rank``: the process that has got furthest; ``is_needed``: whether any process has another state; ``is_ahead``:
    whether that process has made a step that it has not committed."""

    rank: int
    is_needed: bool
    is_ahead: bool


class Progress:
    """The number of commits of one process, and whether its parameters have changed since the last one."""

    def __init__(self) -> None:
        self.commits = -1
        """Number of commits of the training; -1: this process has no part of its state yet."""
        self._steps = 0
        self._committed_steps = 0

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._on_step)

    @staticmethod
    def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        check_reductions(p for group in optimizer.param_groups for p in group["params"])

    def _on_step(self, *_: object) -> None:
        self._steps += 1

    def commit(self) -> None:
        """The state is that of the last step."""
        self.commits += 1
        self._committed_steps = self._steps

    def adopt(self, commits: int) -> None:
        """This process has taken over a state with this number of commits."""
        self.commits = commits
        self._committed_steps = self._steps

    @property
    def is_ahead(self) -> bool:
        """Whether an optimizer has made a step since the last commit."""
        return self._steps != self._committed_steps

    def compare(self) -> tuple[Source, int]:
        """Find the process that has got furthest, and its number of commits. Collective.

        Of those, one without a step that is not committed is preferred, since the rest of its state belongs to its
        parameters; then the lowest rank."""
        every: list[tuple[int, bool]] = allgather_object((self.commits, self.is_ahead))
        order = sorted(range(len(every)), key=lambda rank: (-every[rank][0], every[rank][1]))
        best = every[order[0]]
        source = Source(order[0], any(each != best for each in every) or best[1], best[1])
        return source, best[0]


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
    data = tensor.contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # Multiplied with odd numbers that depend on the place, so that exchanged elements are noticed. Sums wrap around.
    for part in (words, rest):
        places = torch.arange(part.numel(), dtype=torch.int64, device=tensor.device)
        total = total * 31 + (part * (2 * places + 1)).sum()
    return int(total)
