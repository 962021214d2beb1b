"""One of two replicas with a process group of torchft that runs in a child process. The second one, or its child, is
killed; the first one goes on, with the second one if that still exists.

Arguments: address of a store of PyTorch; index of this replica; "child" or "replica", which is killed; module and class
of the group. Prints what it has seen as JSON."""

import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.process_group import reconfigure_with_store

LIMIT = timedelta(seconds=100)


def main(address: str, index: int, killed: str, module: str, kind: str) -> None:
    group = getattr(importlib.import_module(module), kind)(timeout=LIMIT)

    def configure(number: int, size: int) -> None:
        reconfigure_with_store(group, f"{address}/{number}", index, size, LIMIT)

    def total() -> float:
        tensor = torch.tensor([2.0**index])
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        return tensor.item()

    configure(0, 2)
    seen = {"before": [total()]}
    tensor = torch.tensor([2.0**index])
    dist.all_reduce(tensor, group=group)  # without async_op
    seen["before"].append(tensor.item())
    tensor = torch.tensor([2.0**index])
    group.allreduce([tensor], dist.AllreduceOptions()).get_future().wait()
    seen["before"].append(tensor.item())
    if index == 1:
        os.kill(group._p.pid if killed == "child" else os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        total()
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    seen["seconds"] = time.monotonic() - begin
    size = 2 if killed == "child" else 1
    configure(1, size)
    seen["after"] = [total() for _ in range(3)]
    group.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":  # the children import this file, too
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
