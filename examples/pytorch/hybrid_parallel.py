"""Train a network with tensor and data parallelism on a 2 x 2 grid of processes.

    torchrun --standalone --nproc-per-node=4 examples/pytorch/hybrid_parallel.py

The grid is a DeviceMesh of PyTorch on horoplug's backend of torch.distributed. Along its axis "tensor", each process
has half of the columns of the first layer and half of the rows of the second one. Along its axis "data", each process
has half of the batch, and FSDP divides what is left of the parameters. The program prints how far the result is from
that of one process that trains alone.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

INPUTS, HIDDEN, OUTPUTS, BATCH = 16, 32, 4, 24


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUTPUTS))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The whole batches, the same on every process."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps, BATCH, INPUTS, generator=generator)
    return [(each, each[:, :OUTPUTS].sin()) for each in inputs]


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the parameters, in place."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])


def train(model: nn.Module, steps: int, part: int, parts: int) -> dict[str, torch.Tensor]:
    """Train on part number ``part`` of each batch. Returns the whole parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, targets in batches(steps):
        mine = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
        loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def difference(steps: int) -> float:
    """Train on the grid and alone. Returns the largest difference between two parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    distribute(model, mesh)
    together = train(model, steps, mesh["data"].get_local_rank(), 2)
    alone = train(network(), steps, 0, 1)
    return max(float((together[name] - value).abs().max()) for name, value in alone.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("horoplug")
    found = difference(arguments.steps)
    if dist.get_rank() == 0:
        print(f"largest difference to one process after {arguments.steps} steps: {found:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
