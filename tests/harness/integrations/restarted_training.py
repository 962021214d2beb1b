"""Trains with DDP under torchrun and fails once: python restarted_training.py FOLDER kill|raise."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, FAILS_AT = 8, 5


def train(folder, failure, backend="horoplug"):
    """Returns the step at which this attempt has begun, and the parameters at the end."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 2)
    checkpoint, failed = Path(folder) / "checkpoint.pt", Path(folder) / "failed"
    begin = 0
    if checkpoint.exists():
        begin, state = torch.load(checkpoint)
        model.load_state_dict(state)
    else:
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.zeros_(model.bias)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(begin, STEPS):
        # Each agent counts its own restarts, so TORCHELASTIC_RESTART_COUNT does not tell this.
        if step == FAILS_AT and rank == size - 1 and not failed.exists():
            failed.touch()
            if failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this rank fails once")
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(6, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        if rank == 0 and step % 2 == 1:
            torch.save((step + 1, model.state_dict()), checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    result = {"begin": begin, "size": size}
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save(result | {"parameters": parameters}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    return begin


def launch(folder, failure):
    """Run :func:`train` by the agent's function, as a program that starts its own processes does."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="launched",
        monitor_interval=0.1,
        start_method="spawn",
    )
    begins = elastic_launch(config, train)(folder, failure)
    assert begins == {0: 4, 1: 4}, begins


if __name__ == "__main__":
    function = launch if sys.argv[3:] == ["launch"] else train
    function(*sys.argv[1:3])
