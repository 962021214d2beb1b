"""``horoplug.torch.c10d``: the backend of ``torch.distributed``."""

from datetime import timedelta

import torch
import torch.distributed as dist

import horoplug.torch.c10d
from horoplug.torch.c10d import ProcessGroup


def main() -> None:
    horoplug.torch.c10d.replace_gloo()
    dist.init_process_group("horoplug", timeout=timedelta(seconds=30))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    group: dist.ProcessGroup = ProcessGroup(store, 0, 1, timedelta(seconds=30))
    print(group.size(), group.rank())
    dist.destroy_process_group()
