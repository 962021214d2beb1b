"""The barrier of ``torch.distributed.monitored_barrier``, which tells rank 0 which ranks did not come.

Every rank sends to rank 0, which answers when all have come. The error texts are those of Gloo, for which programs
look."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch

_TAG = 2**31 - 1  # that no program uses


class Sends(Protocol):
    """What the barrier needs from a process group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any: ...

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any: ...


def monitored_barrier(group: Sends, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until all ranks have called this function.

    Raises RuntimeError if they have not after ``timeout``: rank 0 names the first rank that did not come, or with
    ``wait_all_ranks`` all of them; the other ranks refer to rank 0."""
    if group.rank() == 0:
        _gather(group, timeout, wait_all_ranks)
    else:
        _report(group, timeout)


def _token() -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.uint8)]


def _gather(group: Sends, timeout: timedelta, wait_all_ranks: bool) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    awaited = {rank: group.recv(_token(), rank, _TAG) for rank in range(1, group.size())}
    missing: list[int] = []
    for rank, work in awaited.items():
        assert work is not None
        left = deadline - time.monotonic()
        if left <= 0 and not missing and not work.is_completed():
            raise RuntimeError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {_milliseconds(timeout)}, waiting for {rank}"
            )
        try:
            _wait(work, left)
        except RuntimeError as error:
            missing.append(rank)
            if not wait_all_ranks:
                raise RuntimeError(_text([rank], timeout)) from error
    if missing:
        raise RuntimeError(_text(missing, timeout))
    for rank in awaited:
        answer = group.send(_token(), rank, _TAG)
        assert answer is not None
        _wait(answer, deadline - time.monotonic())


def _wait(work: Any, seconds: float) -> None:
    """Unlike ``work.wait(timeout)`` in place of Gloo, this does not end the group if the other rank is late."""
    if not work.ends_within(timedelta(seconds=max(seconds, 0.001))):
        raise RuntimeError(f"not done after {seconds:g} s")
    work.wait()


def _text(ranks: list[int], timeout: timedelta) -> str:
    who = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"[Rank 0]: {who} failed to pass monitoredBarrier in {_milliseconds(timeout)}"


def _milliseconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds() * 1000:.0f} ms"


def _report(group: Sends, timeout: timedelta) -> None:
    rank = group.rank()
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        for work in (group.send(_token(), 0, _TAG), group.recv(_token(), 0, _TAG)):
            assert work is not None
            _wait(work, deadline - time.monotonic())
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0; see what rank 0 says about the faulty rank. Reason: {error}"
        ) from error
