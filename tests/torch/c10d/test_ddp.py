"""DistributedDataParallel on horoplug trains as it does on Gloo."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.harness.process_groups import process_groups
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aa", "aab")

STEPS = 4
Builtin = dist.BuiltinCommHookType


class Branches(nn.Module):
    """A model of which a step uses one of two branches."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, batch, branch=0):
        return self.branches[branch](torch.relu(self.first(batch)))


def model(key):
    torch.manual_seed(key)
    return nn.Sequential(
        nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 3)
    )


def batches(key, count=STEPS, rows=5):
    generator = torch.Generator().manual_seed(key + dist.get_rank())
    return [torch.randn(rows, 6, generator=generator) for _ in range(count)]


def train(key, group, hook=None, module=None, forward=None, rows=5, steps=STEPS, **options):
    """The parameters after some steps. ``hook``: registers a communication hook."""
    options = {"bucket_cap_mb": 0.005} | options
    parallel = DistributedDataParallel(module or model(key), process_group=group, **options)
    if hook is not None:
        hook(parallel, group)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(batches(key, steps, rows)):
        optimizer.zero_grad()
        output = forward(parallel, batch, step) if forward else parallel(batch)
        output.square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parallel.parameters()]


def compare(key, variant):
    """The same training on horoplug and on Gloo. Parameters are equal on all ranks, bit by bit."""
    gloo = dist.new_group(backend="gloo")
    expected = variant(key, gloo)
    for actual, other in zip(variant(key, dist.group.WORLD), expected, strict=True):
        tolerance = 1e-3 if variant in SIXTEEN_BITS else 1e-5
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=tolerance)
        everywhere = [torch.zeros_like(actual) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, actual)
        assert all(torch.equal(each, actual) for each in everywhere)
    dist.destroy_process_group(gloo)


def plain(key, group):
    return train(key, group)


def bucket_views(key, group):
    return train(key, group, gradient_as_bucket_view=True)


def static_graph(key, group):
    return train(key, group, static_graph=True, gradient_as_bucket_view=True)


def unused_parameters(key, group):
    torch.manual_seed(key)

    def forward(parallel, batch, step):
        return parallel(batch, step % 2)

    return train(key, group, None, Branches(), forward, find_unused_parameters=True)


def no_sync(key, group):
    def forward(parallel, batch, step):
        with parallel.no_sync():
            parallel(batch).sum().backward()
        return parallel(batch)

    return train(key, group, forward=forward)


def mixed_precision(key, group):
    """By autocast: DDP's own option needs streams, which host memory has not."""

    def forward(parallel, batch, step):
        with torch.autocast("cpu", torch.bfloat16):
            return parallel(batch)

    return train(key, group, forward=forward)


def allreduce_hook(key, group):
    return train(
        key, group, lambda ddp, state: ddp.register_comm_hook(state, default_hooks.allreduce_hook)
    )


def fp16_hook(key, group):
    return train(
        key,
        group,
        lambda ddp, state: ddp.register_comm_hook(state, default_hooks.fp16_compress_hook),
    )


def bf16_hook(key, group):
    def on_cpu(state, bucket):  # DDP refuses the hook itself, by its name, where there is no GPU
        return default_hooks.bf16_compress_hook(state, bucket)

    return train(key, group, lambda ddp, state: ddp.register_comm_hook(state, on_cpu))


def builtin_allreduce(key, group):
    return train(key, group, lambda ddp, _: ddp._register_builtin_comm_hook(Builtin.ALLREDUCE))


def builtin_fp16(key, group):
    return train(key, group, lambda ddp, _: ddp._register_builtin_comm_hook(Builtin.FP16_COMPRESS))


def post_local_sgd(key, group):
    """Ranks average gradients for two steps, and then their models after every second step."""
    parallel = DistributedDataParallel(model(key), process_group=group)
    alone = dist.new_subgroups(1, backend=dist.get_backend(group))[0]
    state = post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=2)
    parallel.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(parallel.parameters(), lr=0.1),
        PeriodicModelAverager(period=2, warmup_steps=2, process_group=group),
    )
    for batch in batches(key, 5):
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group(alone)
    return [parameter.detach() for parameter in parallel.parameters()]


def uneven_inputs(key, group):
    """Ranks have different numbers of batches, with the optimizer's state divided among them."""
    parallel = DistributedDataParallel(model(key), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), torch.optim.SGD, process_group=group, lr=0.1, momentum=0.9
    )
    with Join([parallel, optimizer]):
        for batch in batches(key, 2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            parallel(batch).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in parallel.parameters()]


def zero_redundancy(key, group):
    parallel = DistributedDataParallel(model(key), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    for batch in batches(key):
        optimizer.zero_grad()
        parallel(batch).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(0)
    if dist.get_rank(group) == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    return [parameter.detach() for parameter in parallel.parameters()]


VARIANTS = [
    plain,
    bucket_views,
    static_graph,
    unused_parameters,
    no_sync,
    mixed_precision,
    allreduce_hook,
    fp16_hook,
    bf16_hook,
    builtin_allreduce,
    builtin_fp16,
    post_local_sgd,
    uneven_inputs,
    zero_redundancy,
]


# The backends add numbers in different orders.
SIXTEEN_BITS = [mixed_precision, fp16_hook, bf16_hook, builtin_fp16]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: each.__name__)
@pytest.mark.short("aa-*")
def test_parameters_are_those_of_gloo(groups, variant):
    groups.run(compare, seed(), variant)


def one_process(key):
    """DDP on equal parts of a batch gives the parameters of one process on the whole batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(key))
    alone = model(key)
    parallel = DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.005)
    for module, batch in ((alone, whole), (parallel, whole.chunk(size)[rank])):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(10):  # enough for the core to install a plan
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    for actual, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_parameters_are_those_of_one_process(groups):
    groups.run(one_process, seed())


def power_sgd(key):
    """The gradient of one row has rank 1, so that the hook's approximation is exact.

    It is not compared with Gloo, on which the hook hangs: its callbacks wait for further operations. There are several
    buckets, so that callbacks of one run while backward() submits others."""
    rank = dist.get_world_size()

    def register(parallel, group):
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=2, random_seed=key
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    exact = train(key, dist.group.WORLD, rows=1, steps=12)
    for actual, expected in zip(
        train(key, dist.group.WORLD, register, rows=1, steps=12), exact, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=2e-3)


def test_power_sgd(groups):
    groups.run(power_sgd, seed())


def sync_batch_norm():
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DistributedDataParallel(module)


def test_sync_batch_norm_needs_a_gpu(groups):
    """DDP refuses PyTorch's layer in host memory on every backend. ``horoplug.torch.SyncBatchNorm`` works there."""
    groups.run(sync_batch_norm)
