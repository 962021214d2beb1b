"""Programs of ``torch.distributed`` under torch.compile, on the default group.

Each one takes a function that compiles a module or a function, and returns tensors that do not depend on it: those of
the program without a compiler are the reference. They run with PyTorch 2.4 and newer."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # PyTorch 2.4
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before PyTorch 2.6
    from torch.distributed._composable.fsdp import fully_shard

STEPS = 4  # DDP makes its buckets anew after the first step, and the core installs a plan
Compile = Callable[[Any], Any]


def model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(5, 6, generator=generator) for _ in range(STEPS)]


def train(module: nn.Module, compile: Compile) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    compiled = compile(module)
    for batch in batches():
        optimizer.zero_grad()
        compiled(batch).square().mean().backward()
        optimizer.step()


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in module.parameters()]


def ddp(compile: Compile, **options: Any) -> list[torch.Tensor]:
    module = DistributedDataParallel(model(), **options)
    train(module, compile)
    return parameters(module)


def static_graph(compile: Compile) -> list[torch.Tensor]:
    return ddp(compile, static_graph=True)


def fsdp1(compile: Compile) -> list[torch.Tensor]:
    module = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(module, compile)
    with FullyShardedDataParallel.summon_full_params(module):
        return parameters(module)


def fsdp2(compile: Compile) -> list[torch.Tensor]:
    module, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module[0], module[2], module[4], module):
        fully_shard(layer, mesh=mesh)
    train(module, compile)
    return [each.full_tensor() for each in parameters(module)]


def dtensor(compile: Compile) -> list[torch.Tensor]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(7)
    left = torch.randn(4, 2 * size, generator=generator)
    right = torch.randn(2 * size, 3, generator=generator)

    def product(a: Any, b: Any) -> Any:
        return (a @ b).redistribute(placements=[Replicate()]).to_local().tanh()

    compiled = compile(product)
    found = []
    for placements in ((Shard(1), Shard(0)), (Replicate(), Replicate()), (Shard(0), Replicate())):
        operands = [
            distribute_tensor(each, mesh, [placement]).requires_grad_()
            for each, placement in zip((left, right), placements, strict=True)
        ]
        output = compiled(*operands)
        output.sum().backward()
        found += [output.detach(), *(each.grad.full_tensor() for each in operands)]
    return found


def pipeline(compile: Compile) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(size)]
    layer, batch, target = copy.deepcopy(layers[rank]), torch.randn(8, 4), torch.randn(8, 4)
    arguments = (compile(layer), rank, size, torch.device("cpu"))
    try:
        stage = PipelineStage(*arguments)
    except TypeError:  # PyTorch 2.4 wants to know the shape of a microbatch
        stage = PipelineStage(*arguments, input_args=batch[:2])
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        if rank == size - 1:
            schedule.step(*([batch] if rank == 0 else []), target=target, losses=losses)
        elif rank == 0:
            schedule.step(batch)
        else:
            schedule.step()
    return [each.grad.clone() for each in layer.parameters()]


# ---- calls in compiled functions -------------------------------------------------------------------------------------


def in_graph(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x * 2


def after_a_break(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    print(end="")
    dist.all_reduce(x)
    return x


def asynchronous(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    dist.all_reduce(x, async_op=True).wait()
    return x


def by_future(x: torch.Tensor) -> torch.Tensor:
    (x,) = dist.all_reduce(x * 3, async_op=True).get_future().wait()
    return x - 1


def broadcast(x: torch.Tensor) -> torch.Tensor:
    dist.broadcast(x, 0)
    return x + 1


def around(x: torch.Tensor) -> torch.Tensor:
    """Each rank sends to the next one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros_like(x)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    work.wait()
    return received * 2


def barrier(x: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return x - dist.get_rank()


# Without the collectives of objects, which PyTorch 2.13 refuses in compiled functions on every backend.
FUNCTIONS = (in_graph, after_a_break, asynchronous, by_future, broadcast, around, barrier)


def calls(compile: Compile) -> list[torch.Tensor]:
    found = []
    for function in FUNCTIONS:
        compiled = compile(function)
        found += [compiled(torch.tensor([step + 1.0, dist.get_rank()])) for step in range(3)]
    return found


PROGRAMS = (ddp, static_graph, fsdp1, fsdp2, dtensor, pipeline, calls)
COMPILERS = ("eager", "aot_eager", "inductor")


def outcome(program: Callable[[Compile], list[torch.Tensor]], compiler: str) -> Any:
    """What a program returns, or one line about its exception. Empty ``compiler``: without one."""
    torch._dynamo.reset()
    try:
        return program(lambda of: torch.compile(of, backend=compiler) if compiler else of)
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
