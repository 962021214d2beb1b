"""SyncBatchNorm equals BatchNorm over the batches of all ranks: outputs, gradients, statistics."""

import copy
import pickle

import pytest
import torch
from torch import nn

import horoplug.torch as hvd
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "aab")

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TAIL = {2: (), 3: (5,), 4: (3, 2), 5: (2, 3, 2)}


def batches(key, dims, rows, dtype=torch.float64, channels=4):
    """Inputs of all ranks, and factors by which the outputs are multiplied in the loss."""
    made = torch.Generator().manual_seed(key)
    shapes = [(n, channels, *TAIL[dims]) for n in rows]
    draw = [torch.randn(2, *s, generator=made, dtype=torch.float64) * 3 + 5 for s in shapes]
    return [d[0].to(dtype) for d in draw], [d[1].to(dtype) for d in draw]


def pair(dims, key, dtype=torch.float64, **options):
    """A BatchNorm and a SyncBatchNorm layer with the same parameters."""
    plain = PLAIN[dims](4, **options).to(dtype)
    sync = hvd.SyncBatchNorm(4, **options).to(dtype)
    made = torch.Generator().manual_seed(key)
    with torch.no_grad():
        for a, b in zip(plain.parameters(), sync.parameters(), strict=True):
            a.copy_(torch.randn(4, generator=made))
            b.copy_(a)
    return plain, sync


def same(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **(tolerance or {"rtol": 1e-9, "atol": 1e-9}))


def compare(plain, sync, inputs, factors, **tolerance):
    """Compare outputs, gradients and statistics of both layers for one step."""
    rank = hvd.rank()
    whole = torch.cat(inputs).requires_grad_()
    mine = inputs[rank].clone().requires_grad_()
    expected, actual = plain(whole), sync(mine)
    assert actual.dtype == mine.dtype
    (expected * torch.cat(factors)).sum().backward()
    (actual * factors[rank]).sum().backward()
    rows = [len(x) for x in inputs]
    same(actual, expected.split(rows)[rank], **tolerance)
    same(mine.grad, whole.grad.split(rows)[rank], **tolerance)
    for a, b in zip(plain.parameters(), sync.parameters(), strict=True):
        same(hvd.allreduce(b.grad, op=hvd.Sum), a.grad, **tolerance)
        a.grad = b.grad = None
    for (name, a), (_, b) in zip(plain.named_buffers(), sync.named_buffers(), strict=True):
        same(
            b,
            a,
            msg=lambda m, name=name: f"{name}: {m}",
            **(tolerance or {"rtol": 1e-9, "atol": 1e-9}),
        )


def check_reference(key, dims, rows, options):
    plain, sync = pair(dims, key, **options)
    for step in range(3):
        compare(plain, sync, *batches(key + step, dims, rows[: hvd.size()]))
    plain.eval()
    sync.eval()
    (x, *_), _ = batches(key, dims, [2 + hvd.rank()])
    if options.get("track_running_stats", True):
        same(sync(x), plain(x))
    assert plain.state_dict().keys() == sync.state_dict().keys()


@pytest.mark.parametrize("dims", PLAIN)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None, "eps": 0.1},
        {"affine": False, "momentum": 0.3},
        {"track_running_stats": False},
    ],
    ids=["plain", "cumulative", "not affine", "untracked"],
)
@pytest.mark.short("aa-*")
def test_sync_batch_norm_equals_batch_norm_on_one_batch(ranks, dims, options):
    ranks.run(check_reference, seed(), dims, [3, 5, 2], options)


@pytest.mark.parametrize("rows", [[0, 4, 3], [4, 0, 0], [1, 1, 1]], ids=str)
def test_sync_batch_norm_with_empty_and_small_batches(ranks, rows):
    ranks.run(check_reference, seed(), 4, rows, {})
    if sum(rows[: ranks.size]) > 1:
        ranks.run(check_reference, seed(), 2, rows, {})


def check_large_mean(key):
    """The statistics are accurate if the mean is much larger than the deviation."""
    plain, sync = pair(4, key)
    inputs, factors = batches(key, 4, [4] * hvd.size())
    sync32 = copy.deepcopy(sync).float()
    inputs = [x + 1000 for x in inputs]
    compare(plain, sync, inputs, factors)
    mine = inputs[hvd.rank()].float()
    expected = plain(torch.cat([x.float().double() for x in inputs])).chunk(hvd.size())[hvd.rank()]
    torch.testing.assert_close(sync32(mine).double(), expected, rtol=2e-3, atol=2e-3)


def check_dtypes(key):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)):
        for parameters in {torch.float32, dtype}:
            inputs, factors = batches(key, 4, [3 + r for r in range(hvd.size())], dtype)
            _, sync = pair(4, key, parameters)
            plain, _ = pair(4, key, torch.float64)
            with torch.no_grad():
                for a, b in zip(plain.parameters(), sync.parameters(), strict=True):
                    a.copy_(b)
            mine = inputs[hvd.rank()].clone().requires_grad_()
            whole = torch.cat(inputs).double().requires_grad_()
            out, right = sync(mine), plain(whole)
            assert out.dtype == dtype
            rows = [len(x) for x in inputs]
            close = {"rtol": tolerance, "atol": tolerance}
            same(out.double(), right.split(rows)[hvd.rank()], **close)
            (out * factors[hvd.rank()]).sum().backward()
            (right * torch.cat(factors)).sum().backward()
            assert mine.grad.dtype == dtype
            same(
                mine.grad.double(),
                whole.grad.split(rows)[hvd.rank()],
                rtol=tolerance,
                atol=tolerance * 10,
            )
            assert sync.weight.grad.dtype == parameters
            same(sync.running_mean.double(), plain.running_mean, **close)


def check_memory_order(key):
    _, sync = pair(4, key)
    inputs, _ = batches(key, 4, [3] * hvd.size())
    x = inputs[hvd.rank()]
    expected = sync(x)
    assert torch.equal(sync(x.to(memory_format=torch.channels_last)), expected)
    assert torch.equal(sync(x.transpose(2, 3)), expected.transpose(2, 3))


class Twice(nn.Module):
    """A layer that is used twice in one pass, with another layer in between."""

    def __init__(self, norm, other):
        super().__init__()
        self.norm, self.other = norm, other

    def forward(self, x):
        y = self.norm(x)
        return self.norm(torch.tanh(self.other(y * 2)) + x * x) + y


def check_several(key):
    (plain, sync), (plain_other, sync_other) = pair(4, key), pair(4, key + 1)
    joined, mine = Twice(plain, plain_other), Twice(sync, sync_other)
    for step in range(3):
        compare(joined, mine, *batches(key + step, 4, [2 + r for r in range(hvd.size())]))


def check_dropped_graphs(key):
    """Some ranks keep their graphs and others drop them."""
    plain, sync = pair(4, key)
    kept = []
    for step in range(6):
        inputs, factors = batches(key + step, 4, [3] * hvd.size())
        output = sync(inputs[hvd.rank()].clone().requires_grad_())
        plain(torch.cat(inputs))
        if (step + hvd.rank()) % 2:
            kept.append(output)
        with torch.no_grad():
            sync(inputs[hvd.rank()])
            plain(torch.cat(inputs))
        compare(plain, sync, inputs, factors)


def check_convert(key):
    shared = nn.BatchNorm2d(4, eps=0.01, momentum=0.2)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        shared,
        nn.Sequential(nn.ReLU(), shared),
        nn.BatchNorm2d(4, affine=False),
    )
    model[1].num_batches_tracked += 7
    model[3].eval()
    before = copy.deepcopy(model).state_dict()
    parameters = list(model.parameters())
    made = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert made is model
    assert [type(m) for m in made.modules()].count(hvd.SyncBatchNorm) == 2
    assert not any(type(m) is nn.BatchNorm2d for m in made.modules())
    assert made[1] is made[2][1]
    assert (made[1].eps, made[1].momentum, made[3].affine) == (0.01, 0.2, False)
    assert made[1].training
    assert not made[3].training
    assert all(a is b for a, b in zip(made.parameters(), parameters, strict=True))
    after = made.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    single = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3), hvd.global_process_set)
    assert isinstance(single, hvd.SyncBatchNorm)
    assert single.process_set is hvd.global_process_set
    again = pickle.loads(pickle.dumps(made))
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(key + hvd.rank()))
    torch.testing.assert_close(again(x), copy.deepcopy(made)(x))


def check_training(key):
    """Training a model with the optimizer equals training in one process on the batches of all ranks."""

    def model():
        torch.manual_seed(key)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 2),
        ).double()

    data = torch.randn(
        4, hvd.size(), 5, 1, 4, 4, generator=torch.Generator().manual_seed(key)
    ).double()
    joined, mine = model(), hvd.SyncBatchNorm.convert_sync_batchnorm(model())
    other = torch.optim.SGD(joined.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, mine.named_parameters())
    for x in data:
        other.zero_grad()
        joined(x.flatten(0, 1)).pow(2).mean().backward()
        other.step()
        optimizer.zero_grad()
        mine(x[hvd.rank()]).pow(2).mean().backward()
        optimizer.step()
    for (name, a), b in zip(joined.state_dict().items(), mine.state_dict().values(), strict=True):
        same(b, a, msg=lambda m, name=name: f"{name}: {m}", rtol=1e-7, atol=1e-7)


def check_new_job(key):
    """The layers work after another init, also if the model is new on some ranks."""
    plain, sync = pair(4, key)
    compare(plain, sync, *batches(key, 4, [3] * hvd.size()))
    hvd.shutdown()
    hvd.init()
    new_plain, new = pair(4, key)
    if hvd.rank() == 0:
        for a, b in ((new_plain, plain), (new, sync)):
            a.load_state_dict(b.state_dict())
        plain, sync = new_plain, new
    compare(plain, sync, *batches(key, 4, [3] * hvd.size()))


def check_refusals(key):
    layer = hvd.SyncBatchNorm(4)
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.ones(4))
    with pytest.raises(ValueError, match="4 channels"):
        layer(torch.ones(2, 3))
    x = torch.ones((1, 4) if hvd.rank() == 0 else (0, 4))
    with pytest.raises(ValueError, match="more than one value per channel"):
        layer(x)
    layer.eval()
    assert layer(x[:, :]).shape == x.shape
    layer.train()
    assert layer(torch.ones(2, 4)).shape == (2, 4)


CHECKS = [
    check_large_mean,
    check_dtypes,
    check_memory_order,
    check_several,
    check_dropped_graphs,
    check_convert,
    check_training,
    check_refusals,
]


@pytest.mark.parametrize("check", CHECKS)
def test_sync_batch_norm_cases(ranks, check):
    ranks.run(check, seed())


def test_sync_batch_norm_after_shutdown_and_init(pool):
    with pool.ranks(2) as ranks:
        ranks.run(check_new_job, seed())


def check_alone(key):
    for dims in PLAIN:
        plain, sync = pair(dims, key)
        for _ in range(2):
            compare(plain, sync, *batches(key, dims, [4]))
    with pytest.raises(ValueError, match="more than 1 value"):
        sync(torch.ones(1, 4, 1, 1, 1, dtype=torch.float64))
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        sync(torch.ones(2, 4, 1, 1, 1, dtype=torch.float64))
    hvd.init()


def test_sync_batch_norm_on_one_rank(pool):
    with pool.ranks(1) as ranks:
        ranks.run(check_alone, seed())
