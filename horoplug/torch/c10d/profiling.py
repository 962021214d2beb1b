"""Shows operations in PyTorch's profiler, under the names that its own backends use, such as "gloo:all_reduce"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from horoplug._native import Op

_TITLES: Final = {
    Op.ALLREDUCE: "all_reduce",
    Op.ALLGATHER: "all_gather",
    Op.ALLTOALL: "all_to_all",
    Op.BARRIER: "barrier",
    Op.BROADCAST: "broadcast",
    Op.GATHER: "gather",
    Op.RECV: "recv",
    Op.REDUCE: "reduce",
    Op.REDUCESCATTER: "reduce_scatter",
    Op.SCATTER: "scatter",
    Op.SEND: "send",
}
is_on = torch._C._autograd._profiler_enabled
_enter = getattr(torch._C._autograd, "_record_function_with_args_enter", None)
_exit = getattr(torch._C._autograd, "_record_function_with_args_exit", None)


class Record:
    """The event of one operation in the profile. It begins when this object is made."""

    __slots__ = ("_record",)

    def __init__(self, title: str, tensors: Sequence[torch.Tensor]) -> None:
        assert _enter is not None
        self._record: Any = _enter(title, *tensors)

    def end(self) -> None:
        """To be called in another thread than the constructor: the profile then shows the event as asynchronous."""
        assert _exit is not None
        _exit(self._record)


def record(
    backend: str, op: Op, tensors: Sequence[torch.Tensor], title: str | None = None
) -> Record | None:
    """The event of an operation that begins now; None unless this thread is being profiled. ``title``: its name instead
    of that of the operation."""
    if not is_on() or _enter is None:
        return None
    return Record(f"{backend}:{title or _TITLES[op]}", tensors)
