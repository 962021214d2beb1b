"""Stands in for Gloo, for programs and libraries in which the name "gloo" is written into the code."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from horoplug.base.log import logger
from horoplug.torch.c10d.process_group import ProcessGroup

_REAL = getattr(distributed_c10d, "ProcessGroupGloo", None)


class StandIn(ProcessGroup):
    """A process group of horoplug with the constructor of Gloo's."""

    own_names = ("horoplug", "gloo")

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta = dist.default_pg_timeout
    ) -> None:
        super().__init__(store, rank, size, timeout)
        # torch.distributed sets the options of a group of Gloo after it has created it.
        self.options = SimpleNamespace(
            _timeout=timeout, global_ranks_in_group=[], group_name="", _devices=[]
        )


def replace_gloo(replace: bool = True) -> None:
    """Create groups of horoplug wherever a program asks ``torch.distributed`` for "gloo"; ``replace=False`` ends that.
    Groups that exist stay what they are.

    HOROPLUG_AS_GLOO=1 calls this function at ``import torch``."""
    wanted = StandIn if replace else _REAL
    if distributed_c10d.__dict__.get("ProcessGroupGloo") is wanted:
        return
    for module in (distributed_c10d, dist):
        if hasattr(module, "ProcessGroupGloo"):
            setattr(module, "ProcessGroupGloo", wanted)  # noqa: B010
    if replace:
        logger.warning('horoplug stands in for the backend "gloo" of torch.distributed')
