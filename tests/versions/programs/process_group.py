"""torch.distributed on the backend horoplug, under torchrun: collectives, DistributedDataParallel, FSDP."""

import copy

import torch
import torch.distributed as dist
from report import Report

import horoplug.torch  # noqa: F401  (PyTorch 2.5 and later find the backend by themselves)

dist.init_process_group("horoplug")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
check = Report(RANK)


def mine(rows: int = 4, rank: int = RANK) -> torch.Tensor:
    return torch.arange(rows * 3).reshape(rows, 3).float() + 100 * rank


def all_mine(rows: int = 4) -> list[torch.Tensor]:
    return [mine(rows, rank) for rank in range(SIZE)]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected)


for name in ("SUM", "MAX", "MIN", "AVG"):
    with check(f"all_reduce {name}"):
        x = mine()
        dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
        parts = torch.stack(all_mine())
        expected = {"SUM": parts.sum(0), "MAX": parts.amax(0), "MIN": parts.amin(0)}
        same(x, expected.get(name, parts.mean(0)))
with check("broadcast"):
    x = mine()
    dist.broadcast(x, src=SIZE - 1)
    same(x, mine(rank=SIZE - 1))
with check("reduce"):
    x = mine()
    dist.reduce(x, dst=0)
    if RANK == 0:
        same(x, sum(all_mine()))
with check("all_gather"):
    parts = [torch.empty(4, 3) for _ in range(SIZE)]
    dist.all_gather(parts, mine())
    same(torch.cat(parts), torch.cat(all_mine()))
with check("all_gather_into_tensor"):
    whole = torch.empty(4 * SIZE, 3)
    dist.all_gather_into_tensor(whole, mine())
    same(whole, torch.cat(all_mine()))
with check("reduce_scatter_tensor"):
    part = torch.empty(2, 3)
    dist.reduce_scatter_tensor(part, mine(2 * SIZE))
    same(part, sum(all_mine(2 * SIZE))[2 * RANK : 2 * RANK + 2])
with check("all_to_all_single"):
    moved = torch.empty(SIZE, 3)
    dist.all_to_all_single(moved, mine(SIZE))
    same(moved, torch.stack([each[RANK] for each in all_mine(SIZE)]))
with check("gather and scatter"):
    parts = [torch.empty(4, 3) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(mine(), parts, dst=0)
    back = torch.empty(4, 3)
    dist.scatter(back, parts, src=0)
    same(back, mine())
with check("send and recv"):
    if RANK == 0:
        dist.send(mine(), dst=1)
    elif RANK == 1:
        x = torch.empty(4, 3)
        dist.recv(x, src=0)
        same(x, mine(rank=0))
with check("barrier"):
    dist.barrier()
with check("objects"):
    things = [None] * SIZE
    dist.all_gather_object(things, {"rank": RANK})
    assert [each["rank"] for each in things] == list(range(SIZE))
with check("new_group"):
    group = dist.new_group([0])
    if RANK == 0:
        x = mine()
        dist.all_reduce(x, group=group)
        same(x, mine())


def train(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


torch.manual_seed(0)
network, inputs = torch.nn.Linear(3, 2), torch.randn(6 * SIZE, 3)
alone = copy.deepcopy(network)
train(alone, inputs)
with check("DistributedDataParallel"):
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(network))
    train(model, inputs.chunk(SIZE)[RANK])
    same(model.module.weight, alone.weight)
if hasattr(torch.distributed, "fsdp") and hasattr(torch.distributed.fsdp, "fully_shard"):
    with check("fully_shard"):
        from torch.distributed.device_mesh import init_device_mesh

        model = copy.deepcopy(network)
        mesh = init_device_mesh("cpu", (SIZE,))
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        train(model, inputs.chunk(SIZE)[RANK])
        same(model.weight.full_tensor(), alone.weight)
check.finish()
dist.destroy_process_group()
