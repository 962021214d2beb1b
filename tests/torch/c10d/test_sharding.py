"""FSDP, DTensor, tensor parallelism, pipelines and distributed checkpoints give the results of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.harness.limits import scaled
from tests.harness.process_groups import process_groups
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aa", "aab")


def model(key):
    torch.manual_seed(key)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def mesh():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def steps(module, batch, count=3):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(count):
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()


def close(actual, expected):
    actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def trained_alone(key):
    """A model trained by one process, and this rank's part of its batches."""
    size = dist.get_world_size()
    whole = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(key))
    alone = model(key)
    steps(alone, whole)
    return alone, whole.chunk(size)[dist.get_rank()]


def fsdp1(key):
    alone, batch = trained_alone(key)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        module = FullyShardedDataParallel(
            model(key),
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        steps(module, batch)
        with FullyShardedDataParallel.summon_full_params(module):
            for actual, expected in zip(module.parameters(), alone.parameters(), strict=True):
                close(actual, expected)


def fsdp2(key):
    alone, batch = trained_alone(key)
    module = model(key)
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh())
    steps(module, batch)
    for actual, expected in zip(module.parameters(), alone.parameters(), strict=True):
        assert isinstance(actual, DTensor)
        close(actual, expected)


def dtensor(key):
    size, devices = dist.get_world_size(), mesh()
    torch.manual_seed(key)
    left, right = torch.randn(2 * size, 3 * size), torch.randn(3 * size, size)
    placements = [Shard(0), Shard(1), Replicate()]
    for one in placements:
        for other in placements:
            a = distribute_tensor(left, devices, [one])
            b = distribute_tensor(right, devices, [other])
            close(a @ b, left @ right)
            close(a.redistribute(placements=[other]), left)
            close(a.sum(0), left.sum(0))
    partial = DTensor.from_local(left, devices, [Partial()])
    close(partial, left * size)
    close(partial.redistribute(placements=[Shard(0)]), left * size)
    highest = DTensor.from_local(left + dist.get_rank(), devices, [Partial("max")])
    close(highest, left + size - 1)


def tensor_parallel(key):
    size = dist.get_world_size()
    torch.manual_seed(key)
    alone = nn.Sequential(
        nn.Linear(6, 4 * size), nn.GELU(), nn.Linear(4 * size, 6), nn.LayerNorm(6)
    ).double()
    batch = torch.randn(2 * size, 6, dtype=torch.float64)
    plans = [
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
            "3": SequenceParallel(sequence_dim=0),
        },
    ]
    for plan in plans:
        expected, module = copy.deepcopy(alone), copy.deepcopy(alone)
        parallelize_module(module, mesh(), plan)
        part = batch if len(plan) == 2 else batch.chunk(size)[dist.get_rank()]
        close(module(part), expected(batch))
        # The sum of a layer norm, or of its squares, has no gradient but rounding errors.
        module(part).pow(3).sum().backward()
        expected(batch).pow(3).sum().backward()
        for actual, other in zip(module.parameters(), expected.parameters(), strict=True):
            close(actual.grad, other.grad)


def pipeline(key):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(key)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(size)]
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    whole = nn.Sequential(*copy.deepcopy(layers))
    expected = whole(batch)
    nn.functional.mse_loss(expected, target).backward()

    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    losses = []
    output = None
    if rank == 0:
        schedule.step(batch)
    elif rank == size - 1:
        output = schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    if output is not None:
        close(output, expected)
        assert len(losses) == 4
    for actual, other in zip(layers[rank].parameters(), whole[rank].parameters(), strict=True):
        close(actual.grad, other.grad)


def checkpoints(key, folder):
    """A checkpoint of a model that is divided among the ranks."""
    module = model(key)
    expected = copy.deepcopy(module).state_dict()
    fully_shard(module, mesh=mesh())
    checkpoint.save(get_model_state_dict(module), checkpoint_id=folder)
    other = model(key + 1)
    fully_shard(other, mesh=mesh())
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder)
    for name, value in other.state_dict().items():
        close(value, expected[name])
    asynchronous = checkpoint.async_save(
        get_model_state_dict(module), checkpoint_id=f"{folder}/async", process_group=None
    )
    asynchronous.result(timeout=scaled(60))
    dist.barrier()


@pytest.mark.parametrize(
    "program", [fsdp1, fsdp2, dtensor, tensor_parallel, pipeline], ids=lambda each: each.__name__
)
@pytest.mark.short("aa-*")
def test_result_is_that_of_one_process(groups, program):
    groups.run(program, seed())


def test_checkpoint(groups, tmp_path):
    groups.run(checkpoints, seed(), str(tmp_path))
