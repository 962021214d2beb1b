"""DistributedOptimizer(gradient_as_bucket_view=True): the same bits as without buckets, also if the program replaces
the views."""

import copy
import os
import signal
import warnings

import pytest
import torch
from torch import nn

import horoplug.torch as hvd
from horoplug.torch import buckets
from horoplug.torch.buckets import GradientLayout, divide
from tests.harness.support import NO_LIMITS, ranks_fixture
from tests.harness.training import CLOSE, Model, equal, joined, train, wrapped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "aaa", "ab", "aab")


class Tower(nn.Module):
    """Convolutions in channels_last order, a layer that is used twice, and one that is never used."""

    def __init__(self, channels_last):
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.unused = nn.Linear(5, 7)
        self.head = nn.Linear(8, 4)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = torch.relu(self.one(x))
        x = self.norm(self.twice(torch.relu(self.twice(x))))
        return self.head(x.mean((2, 3)))


class Mixed(nn.Module):
    """Parameters of three dtypes, without elements, and in another memory order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.wide = nn.Linear(4, 6, dtype=torch.float64)
        self.short = nn.Linear(4, 6, dtype=torch.bfloat16)
        self.plain = nn.Linear(4, 6)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return (
            self.wide(x.double()).float()
            + self.short(x.bfloat16()).float()
            + self.plain(x)
            + x @ self.turned
            + self.empty.sum()
        )


def distributed(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def in_buckets(model, optimizer):
    """Whether every gradient is a view of its place in the bucket."""
    if hvd.size() == 1:
        assert optimizer._buckets is None
        return True
    views = optimizer._buckets._views
    assert set(views) == {p for p in model.parameters() if p.numel()}
    return all(p.grad is view and p.grad.data_ptr() == at for p, (view, at) in views.items())


def pair(make, **options):
    """Two equal models, with buckets and without."""
    return [
        (model, distributed(model, gradient_as_bucket_view=views, **options))
        for views in (True, False)
        for model in [make()]
    ]


def same_bits(made):
    (model, optimizer), (other, _) = made
    assert in_buckets(model, optimizer)
    one_host = len({*hvd.allgather_object(hvd.cross_rank())}) == 1
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        for x, y in ((a, b), (a.grad, b.grad)):
            if y is None:  # a single rank omits unused parameters
                assert x is None
                assert hvd.size() == 1
            elif one_host or hvd.size() == 2:
                assert torch.equal(x, y), name
            else:  # the order of addition between hosts depends on the position in the buffer
                torch.testing.assert_close(x, y)
    whole = [p.detach() for p in model.parameters()]
    for theirs in hvd.allgather_object(whole):
        assert all(map(torch.equal, whole, theirs))


def data(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))


def steps(made, shape, zero=lambda model, optimizer: optimizer.zero_grad(), between=None, count=4):
    for step in range(count):
        for model, optimizer in made:
            zero(model, optimizer)
            model(data(step, *shape)).pow(2).mean().backward()
            if between is not None:
                between(model, optimizer)
            else:
                optimizer.step()
        same_bits(made)


KINDS = {
    "mlp": (Model, (6, 4)),
    "cnn": (lambda: Tower(False), (2, 3, 6, 6)),
    "channels_last": (lambda: Tower(True), (2, 3, 6, 6)),
    "mixed": (Mixed, (5, 4)),
}


def check_kinds(kind):
    make, shape = KINDS[kind]
    steps(pair(make), shape, count=10)  # enough steps to install a plan
    steps(pair(make, op=hvd.Sum), shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.short("aa-*")
def test_buckets_give_the_same_bits(ranks, kind):
    ranks.run(check_kinds, kind)


def check_one_order_of_memory():
    """All ranks use rank 0's memory order of a gradient, since orders may differ between ranks."""
    made = pair(lambda: Tower(hvd.rank() % 2 == 1))
    steps(made, (2, 3, 6, 6))
    if hvd.size() > 1:
        strides = hvd.allgather_object(made[0][0].one.weight.grad.stride())
        assert strides == strides[:1] * hvd.size()


def check_zeroing():
    def in_place(model, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def by_the_model(model, optimizer):
        model.zero_grad()

    def each(model, optimizer):
        for p in model.parameters():
            p.grad = None

    for zero in (in_place, by_the_model, each):
        steps(pair(Model), (6, 4), zero)
    # None as in PyTorch, and not a view of zeros.
    model, optimizer = pair(Model)[0]
    train(optimizer, model, 1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    # Existing gradients are copied into the buckets, and unused ones count as zeros.
    for p in model.first.parameters():
        p.grad = torch.full_like(p, float(hvd.rank()))
    optimizer.step()
    if hvd.size() > 1:
        assert (model.first.weight.grad == (hvd.size() - 1) / 2).all()
        assert not model.second.weight.grad.any()


def check_replaced_gradients():
    """Programs may replace gradients before and after the reduction."""

    def clipped(model, optimizer):
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()

    def another_tensor(model, optimizer):
        optimizer.synchronize()
        for p in model.parameters():
            if p.grad is not None:  # None on a single rank for unused parameters
                p.grad = p.grad * 2
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.synchronize()  # reduces the current gradients again

    def other_data(model, optimizer):
        optimizer.synchronize()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data = p.grad.data * 2
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    for between in (clipped, another_tensor, other_data):
        steps(pair(Model), (6, 4), between=between)
        if between is not other_data:
            keep = lambda model, optimizer: optimizer.zero_grad(set_to_none=False)  # noqa: E731
            steps(pair(Model), (6, 4), keep, between)

    def lost(model, optimizer):
        model.zero_grad()  # too late: the reduced gradients are written nevertheless
        optimizer.step()

    if hvd.size() > 1:
        steps(pair(Model), (6, 4), between=lost)


def check_other_strides_on_the_same_memory():
    made = pair(Model)
    steps(made, (6, 4))
    for model, optimizer in made:
        grad = model.first.weight.grad
        model.first.weight.grad = grad.as_strided(grad.shape, (1, grad.shape[0]))
        optimizer.synchronize()
    assert torch.equal(made[0][0].first.weight.grad, made[1][0].first.weight.grad)


def check_create_graph():
    made = pair(Model, backward_passes_per_step=2)
    for step in range(3):
        for model, optimizer in made:
            optimizer.zero_grad(set_to_none=step == 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns about reference cycles
                model(data(step, 6, 4)).pow(2).mean().backward(create_graph=True)
            # The gradient is part of a graph, as without buckets.
            penalty = sum(p.grad.pow(2).sum() for p in model.first.parameters())
            penalty.backward()
            optimizer.step()
        same_bits(made)
    model, optimizer = pair(Model)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(data(0, 6, 4)).pow(2).mean().backward(create_graph=True)
    assert model.first.weight.grad.requires_grad
    optimizer.step()
    assert in_buckets(model, optimizer)


def check_passes_and_no_sync():
    made = pair(Model, backward_passes_per_step=3)
    for step in range(3):
        for model, optimizer in made:
            optimizer.zero_grad(set_to_none=step != 1)
            for n in range(3):
                model(data(10 * step + n, 6, 4)).pow(2).mean().backward()
            optimizer.step()
        same_bits(made)
    made = pair(Model)
    for step in range(3):
        for model, optimizer in made:
            optimizer.zero_grad(set_to_none=step != 1)
            with optimizer.no_sync():
                model(data(10 * step, 6, 4)).pow(2).mean().backward()
            model(data(10 * step + 1, 6, 4)).pow(2).mean().backward()
            if hvd.size() > 1:
                with pytest.raises(AssertionError, match="zero_grad"):
                    optimizer.zero_grad()
            optimizer.step()
        same_bits(made)


def check_options():
    steps(pair(Model, gradient_predivide_factor=2.0), (6, 4))
    for op in (hvd.Min, hvd.Max, hvd.Product):
        steps(pair(Model, op=op), (6, 4))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        steps(pair(Model, compression=compression), (6, 4))
    model = Model()
    train(wrapped(model, gradient_as_bucket_view=True), model, 3)
    equal(model, joined(3), **CLOSE)


def check_small_buckets():
    """Many buckets, some of which are complete during backward."""
    sizes = buckets.BUCKET_BYTES, buckets.FIRST_BUCKET_BYTES
    buckets.BUCKET_BYTES, buckets.FIRST_BUCKET_BYTES = 5000, 100
    try:

        def wide():
            torch.manual_seed(5)
            layers = [
                nn.Linear(4, 700),
                *(nn.Linear(700, 700) for _ in range(3)),
                nn.Linear(700, 1),
            ]
            return nn.Sequential(*layers)

        made = pair(wide)
        if hvd.size() > 1:
            assert len(made[0][1]._buckets.buckets) > 4
        steps(made, (6, 4))
    finally:
        buckets.BUCKET_BYTES, buckets.FIRST_BUCKET_BYTES = sizes


def check_two_optimizers():
    def halves(views):
        model = Model()
        return model, [
            hvd.DistributedOptimizer(
                torch.optim.SGD(part.parameters(), lr=0.1),
                [(f"{n}.{name}", p) for name, p in part.named_parameters()],
                gradient_as_bucket_view=views,
            )
            for n, part in enumerate((model.first, model.second))
        ]

    made = [halves(True), halves(False)]
    for step in range(3):
        for model, optimizers in made:
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(data(step, 6, 4)).pow(2).mean().backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
    for a, b in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def check_frozen_and_added():
    made = []
    for views in (True, False):
        model = Model()
        model.first.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), gradient_as_bucket_view=views
        )
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.2})
        made.append((model, optimizer))
    for step in range(4):
        for model, optimizer in made:
            optimizer.zero_grad()
            model.first.bias.requires_grad_(step != 2)
            model.first.weight.requires_grad_(step == 3)
            model(data(step, 6, 4)).pow(2).mean().backward()
            optimizer.step()
        for a, b in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
            assert torch.equal(a, b)


def check_state_and_copies():
    made = pair(Model)
    steps(made, (6, 4), count=2)
    model = made[0][0]
    kept = model.first.weight.grad.clone()
    twin = copy.deepcopy(model)
    grads = copy.deepcopy([p.grad for p in model.parameters()])
    for _, each in made:
        each.load_state_dict(copy.deepcopy(each.state_dict()))
    steps(made, (6, 4), count=2)
    assert hvd.size() == 1 or torch.equal(grads[0], kept)
    assert not torch.equal(twin.first.weight, model.first.weight)


def check_joining():
    """A rank with less data joins, and the others continue."""
    torch.manual_seed(0)
    made = pair(Model)
    for model, optimizer in made:
        for step in range(2 + hvd.rank()):
            optimizer.zero_grad()
            model(data(step, 6, 4)).pow(2).mean().backward()
            optimizer.step()
        hvd.join()
    for a, b in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b)


CHECKS = [
    check_one_order_of_memory,
    check_zeroing,
    check_replaced_gradients,
    check_other_strides_on_the_same_memory,
    check_create_graph,
    check_passes_and_no_sync,
    check_options,
    check_small_buckets,
    check_two_optimizers,
    check_frozen_and_added,
    check_state_and_copies,
    check_joining,
]


@pytest.mark.parametrize("check", CHECKS)
def test_buckets_with_model_and_gradient_changes(ranks, check):
    ranks.run(check)


def check_refusals():
    def refused(message, model=None, **options):
        model = model or Model()
        with pytest.raises(ValueError, match=message):
            distributed(model, gradient_as_bucket_view=True, **options)

    refused("compression", compression=type("Own", (hvd.Compression.fp16,), {}))
    refused("groups", groups=2)
    refused("groups", num_groups=2)
    refused("Adasum", op=hvd.Adasum)
    refused("process_set", process_set=hvd.ProcessSet([0]))
    if hvd.size() == 1:
        return
    wide = nn.Linear(2, 2, dtype=torch.float64)
    refused("bias is float64; compression", wide, compression=hvd.Compression.bf16)
    complex_ = nn.Linear(2, 2, dtype=torch.complex64)
    refused("is not a dense floating-point parameter", complex_)
    refused(
        "weight is float32 .* and float32 .* on rank 0 .rank 1.",
        nn.Linear(2 + min(hvd.rank(), 1), 2),
    )
    model = Model() if hvd.rank() == 0 else Model().first
    refused("has a parameter", model)
    # All ranks have raised the error, so no rank waits.
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = distributed(table, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="sparse"):
        table(torch.tensor([1, 2])).sum().backward()
    table.zero_grad()
    optimizer.step()
    hvd.barrier()


def test_invalid_bucket_options_are_refused(ranks):
    ranks.run(check_refusals)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_buckets_after_shutdown_and_init(pool, hosts):
    """The views remain valid after the end of the job, and another job gets its own buckets."""

    def run():
        hvd.init()
        made = pair(Model)
        steps(made, (6, 4), count=2)
        old = made[0][0].first.weight.grad
        hvd.shutdown()
        old.mul_(1)
        hvd.init()
        hvd.barrier()
        for step in range(3):
            for model, optimizer in made:
                optimizer.zero_grad(set_to_none=step == 1)
                model(data(step, 6, 4)).pow(2).mean().backward()
                optimizer.step()
            (model, optimizer), (other, _) = made
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b)
            assert step == 0 or in_buckets(model, optimizer)
        assert model.first.weight.grad.data_ptr() != old.data_ptr()
        hvd.shutdown()

    with pool.ranks(len(hosts), hosts=hosts, init=False) as job:
        job.run(run)


@pytest.mark.parametrize("size", [1, 2])
def test_buckets_in_an_elastic_job(pool, size):
    """In an elastic job the first step uses no buckets, so that old and new ranks create them at the same point."""

    def run():
        made = pair(Model)
        optimizer = made[0][1]
        assert optimizer._buckets is None
        train(optimizer, made[0][0], 1)
        assert len(optimizer._buckets.buckets) == (hvd.size() > 1)
        train(made[1][1], made[1][0], 1)
        if hvd.size() > 1:
            steps(made, (6, 4), count=2)

    with pool.ranks(size, env={"HOROVOD_ELASTIC": "1"}) as job:
        job.run(run)


@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_killed_rank_is_reported_with_buckets(pool, hosts):
    """The other ranks get an error at the next step at the latest, and their views remain valid."""

    def run():
        model, optimizer = pair(Model)[0]
        train(optimizer, model, 2)
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            train(optimizer, model, 3)
        assert torch.isfinite(model.first.weight.grad).all()
        optimizer.zero_grad()
        return str(caught.value)

    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        outcomes = job.outcomes(run)
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert "rank 1" in outcome.value


def test_parameters_are_divided_into_buckets(monkeypatch):
    """Each bucket has one dtype. Buckets are ordered by the time when they are complete, and the first one is small."""
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 256)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1024)

    def place(number, dtype, elements):
        return GradientLayout(str(number), dtype, (elements,), (1,), False)

    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, *[torch.float32] * 20]
    places = [place(n, dtype, 17 if n else 1) for n, dtype in enumerate(kinds)]
    assert places[0].nbytes == 64  # at least a cache line
    divided = divide(places)
    names = [[int(p.name) for p in members] for members in divided]
    assert sorted(n for members in names for n in members) == list(range(len(kinds)))
    assert names[0] == [1, 3] or names[0] == [0, 2, 4]
    assert all(len({p.dtype for p in members}) == 1 for members in divided)
    assert all(sum(p.nbytes for p in m) >= 1024 for m in divided[1:-1])
