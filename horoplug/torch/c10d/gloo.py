"""Stands in for Gloo, for programs and libraries in which the name "gloo" is written into the code."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from horoplug.base.errors import MissingRanksError
from horoplug.base.log import logger
from horoplug.torch.c10d import backend
from horoplug.torch.c10d.process_group import ProcessGroup

_UNKNOWN: list[int] = []  # until torch.distributed sets it; old versions do not
_REAL = getattr(distributed_c10d, "ProcessGroupGloo", None)


class StandIn(ProcessGroup):
    """A process group of horoplug with the constructor of Gloo's."""

    own_names = ("horoplug", "gloo")
    # In PyTorch 2.1, the base class has a property of this name, which cannot be set.
    options: Any = None

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
        enable_reconfigure: bool = False,
    ) -> None:
        super().__init__(store, rank, size, timeout, enable_reconfigure=enable_reconfigure)
        # torch.distributed sets the options of a group of Gloo after it has created it.
        self.options = SimpleNamespace(
            _timeout=timeout, global_ranks_in_group=_UNKNOWN, group_name="", _devices=[]
        )

    def _ranks_in_default(self) -> Sequence[int] | None:
        ranks: Sequence[int] = self.options.global_ranks_in_group
        return None if ranks is _UNKNOWN else ranks

    def _connect(self, limit: timedelta) -> None:
        # Programs such as torchft look for these texts of Gloo.
        try:
            super()._connect(limit)
        except MissingRanksError as error:
            error.args = (f"{error} (Socket Timeout)", *error.args[1:])
            raise
        self._operations.phrase_for_lost_rank = " (Connection closed by peer)"
        # Gloo then closes its connections. Programs go on to end the group, and expect that nothing waits any more.
        self._operations.ends_on_late_transfer = True

    def _similar(self, store: Any, rank: int, ranks: Sequence[int], timeout: timedelta) -> StandIn:
        return type(self)(store, rank, len(ranks), timeout)


class StandInBackend(backend.Backend):
    """For libraries that put together a process group from PyTorch's class and a backend."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = dist.default_pg_timeout,
        enable_reconfigure: bool = False,
    ) -> None:
        super().__init__(StandIn(store, rank, size, timeout, enable_reconfigure))


def replace_gloo(replace: bool = True) -> None:
    """Create groups of horoplug wherever a program asks ``torch.distributed`` for "gloo"; ``replace=False`` ends that.
    Groups that exist stay what they are.

    HOROPLUG_AS_GLOO=1 calls this function at ``import torch``. Raises nothing.

    Example:

        import torch.distributed as dist
        from horoplug.torch.c10d import replace_gloo

        replace_gloo()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))).__name__
        dist.destroy_process_group()
        replace_gloo(replace=False)
    """
    # torch.distributed itself uses the name in its module. It accepts a whole group.
    names = {distributed_c10d: StandIn, dist: StandInBackend if backend.IS_POSSIBLE else StandIn}
    if (distributed_c10d.__dict__.get("ProcessGroupGloo") is StandIn) is replace:
        return
    for module, stand_in in names.items():
        if hasattr(module, "ProcessGroupGloo"):
            setattr(module, "ProcessGroupGloo", stand_in if replace else _REAL)  # noqa: B010
    if replace:
        logger.warning('horoplug stands in for the backend "gloo" of torch.distributed')
