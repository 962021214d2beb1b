"""Uses of DistributedOptimizer in programs: local accumulation, clipping, AMP, bfloat16, torch.compile."""

import contextlib
import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch.nn import functional as F

import horoplug.torch as hvd
from tests.harness import ROOT
from tests.harness.support import ranks_fixture
from tests.harness.training import CLOSE, Model, batches, equal, joined, loss, train, wrapped

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "aab")


def same_everywhere(parameters):
    whole = torch.cat([p.detach().double().flatten() for p in parameters])
    assert all(torch.equal(whole, other) for other in hvd.allgather_object(whole))


# ---- no_sync --------------------------------------------------------------------------------------------------------


def check_no_sync():
    for options in ({}, {"groups": 2}, {"compression": hvd.Compression.none, "groups": 1}):
        model = Model()
        optimizer = wrapped(model, **options)
        data = batches(6)
        for step in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for x in data[3 * step : 3 * step + 2]:
                    loss(model, x[hvd.rank()]).backward()
                    assert not optimizer._handles
            mine = model.first.weight.grad.clone()
            assert hvd.size() == 1 or len({g.sum().item() for g in hvd.allgather_object(mine)}) > 1
            loss(model, data[3 * step + 2][hvd.rank()]).backward()
            optimizer.step()
        equal(model, joined(2, passes=3), **CLOSE)


def check_no_sync_and_passes():
    """Passes inside of no_sync do not count for backward_passes_per_step."""
    model = Model()
    optimizer = wrapped(model, backward_passes_per_step=2)
    for x in batches(8).split(4):
        optimizer.zero_grad()
        for n, batch in enumerate(x):
            if n in (1, 2):
                with optimizer.no_sync(), optimizer.no_sync():
                    loss(model, batch[hvd.rank()]).backward()
            else:
                loss(model, batch[hvd.rank()]).backward()
        optimizer.step()
    equal(model, joined(2, passes=4), **CLOSE)


def check_no_sync_too_late():
    if hvd.size() == 1:
        return
    model = Model()
    optimizer = wrapped(model)
    loss(model, torch.ones(6, 4)).backward()
    with optimizer.no_sync(), pytest.raises(AssertionError, match="more than backward_passes"):
        loss(model, torch.ones(6, 4)).backward()  # writes to gradients that are being reduced
    optimizer.step()
    # An exception ends no_sync.
    with pytest.raises(ZeroDivisionError), optimizer.no_sync():
        _ = 1 / 0
    optimizer.zero_grad()
    loss(model, torch.ones(6, 4)).backward()
    assert optimizer._handles
    optimizer.step()


def check_no_sync_only_before():
    """Gradients that only passes inside of no_sync have written are reduced as well."""
    model = Model()
    optimizer = wrapped(model, options={"lr": 1.0})
    before = model.unused.weight.detach().clone()
    with optimizer.no_sync():
        (model.unused(torch.ones(3)).sum() * (hvd.rank() + 1)).backward()
    loss(model, torch.ones(6, 4)).backward()
    optimizer.step()
    expected = torch.full((3, 3), (hvd.size() + 1) / 2)
    torch.testing.assert_close(before - model.unused.weight, expected)


def check_no_sync_sparse():
    for options in ({}, {"sparse_as_dense": True}, {"groups": 1}):
        table = torch.nn.Embedding(8, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), **options
        )
        with optimizer.no_sync():
            table(torch.tensor([hvd.rank()])).sum().backward()
        table(torch.tensor([7, 7])).sum().backward()
        optimizer.step()
        expected = torch.zeros(8, 2)
        expected[: hvd.size()] = -1 / hvd.size()
        expected[7] = -2
        torch.testing.assert_close(table.weight.detach(), expected)


# ---- submission of gradients ----------------------------------------------------------------------------------------


def check_overlap():
    """Large gradients are submitted during backward."""
    if hvd.size() == 1:
        return
    model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    seen = []

    def look(_):
        seen.append({p: handle for p, (handle, _) in optimizer._handles.items()})

    model[0].weight.register_hook(look)
    model(torch.ones(2, 600)).sum().backward()
    assert isinstance(seen[0].get(model[2].weight), int), "it waits for the end of backward"
    assert model[0].weight not in seen[0]
    assert all(isinstance(handle, int) for handle, _ in optimizer._handles.values())
    assert len(optimizer._handles) == 6
    optimizer.step()
    same_everywhere(model.parameters())


def check_handles():
    """The handles of gradients can be used like others, and step accepts gradients that were synchronised before."""
    if hvd.size() == 1:
        return
    torch.manual_seed(4)  # the ranks' generators may have been used differently
    table = torch.nn.Embedding(5, 4, sparse=True)
    for groups in (None, 2, [[table.weight]]):
        model = Model()
        named = [*model.named_parameters(), ("table", table.weight)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in named], lr=0.1), named, groups=groups
        )
        for _ in range(2):
            assert not optimizer._handles
            loss(model, table(torch.tensor([hvd.rank()] * 6))).backward()
            assert optimizer._handles
            for unit, (handle, _) in sorted(
                optimizer._handles.items(), key=lambda item: str(item[1])
            ):
                if callable(handle):
                    handle()
                elif unit is not model.second.bias:  # synchronised by step
                    output = hvd.synchronize(handle)
                    assert hvd.poll(handle)
                    tensors = output if isinstance(unit, tuple) else [output]
                    for p, tensor in zip(unit if isinstance(unit, tuple) else [unit], tensors):  # noqa: B905
                        assert p is table.weight or tensor is p.grad
            optimizer.step()
            optimizer.zero_grad()
        same_everywhere(p for _, p in named)
        del optimizer


def check_two_optimizers():
    """Two optimizers get their gradients from one backward pass."""
    model = Model()
    halves = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9), part.named_parameters(name)
        )
        for name, part in model.named_children()
    ]
    for x in batches(3):
        for optimizer in halves:
            optimizer.zero_grad()
        loss(model, x[hvd.rank()]).backward()
        for optimizer in halves:
            optimizer.step()
    equal(model, joined(3), **CLOSE)


def documented(heading):
    """The first program in docs/pytorch.md after a line that contains these words."""
    text = (ROOT / "docs/pytorch.md").read_text().split(heading)[1]
    return text.split("```python\n")[1].split("```")[0]


def check_documented_gan():
    size, rank = hvd.size(), hvd.rank()
    random = torch.Generator().manual_seed(5)
    everything = torch.randn(4, 2, size, 3, 4, generator=random)
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    state = {
        "hvd": hvd,
        "torch": torch,
        "loss": lambda logits, value: loss(logits, torch.full_like(logits, value)),
    }

    def models():
        torch.manual_seed(2)
        tanh = torch.nn.Tanh()
        generator = torch.nn.Sequential(torch.nn.Linear(4, 5), tanh, torch.nn.Linear(5, 4))
        return {"generator": generator, "discriminator": torch.nn.Linear(4, 1)}

    program = documented("## Two optimizers on one model")
    mine, alone = models(), models()
    exec(program, state | mine | {"batches": [b[:, rank] for b in everything]})

    class OneRank:
        @staticmethod
        def DistributedOptimizer(optimizer, named_parameters):
            optimizer.no_sync = contextlib.nullcontext
            return optimizer

    whole = [b.flatten(1, 2) for b in everything]
    exec(program, state | alone | {"hvd": OneRank, "batches": whole})
    for name, model in mine.items():
        equal(model, alone[name], rtol=1e-3, atol=1e-5)
    if size > 1:
        wrong = program.replace("with d_optimizer.no_sync():", "if True:")
        with pytest.raises(AssertionError, match=r"zero_grad\(\) was called between"):
            exec(wrong, state | models() | {"batches": [b[:, rank] for b in everything]})


def check_documented_allgather():
    size, rank = hvd.size(), hvd.rank()
    program = documented("Gradients follow Horovod's rules")
    x = torch.randn(size, 3, 4, generator=torch.Generator().manual_seed(6))

    def contrast(features, gathered, r):
        return torch.logsumexp(features @ gathered.t(), 1).mean() * (r + 1)

    model, alone = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = {"hvd": hvd, "features": model(x[rank])}
    exec(program, state)
    contrast(state["features"], state["gathered"], rank).backward()
    optimizer.step()
    gathered = alone(x.flatten(0, 1))
    losses = [contrast(alone(x[r]), gathered, r) for r in range(size)]
    (sum(losses) / size).backward()
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    equal(model, alone, rtol=1e-4, atol=1e-5)


def check_failed_backward():
    """After an exception during backward, step reduces the existing gradients."""
    if hvd.size() == 1:
        return
    model = Model()
    optimizer = wrapped(model)
    for attempt in range(2):
        fail = model.first.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(model, batches(1)[0][hvd.rank()]).backward()
        fail.remove()
        if attempt:
            optimizer.step()
        else:
            with pytest.raises(AssertionError):
                optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())  # discards the pending gradients
        optimizer.zero_grad()
    train(optimizer, model, 2)
    same_everywhere(model.parameters())


def check_checkpointing():
    """Checkpointing runs a backward pass inside of another one."""
    for reentrant in (True, False):
        model = Model()
        optimizer = wrapped(model)
        for x in batches(3):
            optimizer.zero_grad()
            mine = x[hvd.rank()].clone().requires_grad_()
            hidden = torch.utils.checkpoint.checkpoint(
                lambda x, model=model: torch.tanh(model.first(x)), mine, use_reentrant=reentrant
            )
            (model.second(hidden) ** 2).mean().backward()
            optimizer.step()
        equal(model, joined(3), **CLOSE)


# ---- changes of parameters ------------------------------------------------------------------------------------------


def check_requires_grad_changes():
    """A generator and a discriminator are trained in turn."""
    one, other = torch.nn.Conv2d(1, 10, 1), torch.nn.Conv2d(10, 1, 1)
    x = torch.rand(1, 1, 10, 10)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(name))
        for m, name in ((one, "one"), (other, "other"))
    ]
    hvd.broadcast_parameters(one.state_dict(), 0)
    hvd.broadcast_parameters(other.state_dict(), 0)
    for step in range(6):
        for place, model in enumerate((one, other)):
            for p in model.parameters():
                p.requires_grad_(place == step % 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        other(one(x)).sum().backward()
        for place, model in enumerate((one, other)):
            for p in model.parameters():
                assert (place == step % 2) == (p.grad is not None and bool(p.grad.any()))
        optimizers[step % 2].step()
    same_everywhere([*one.parameters(), *other.parameters()])


def check_thawed():
    """Parameters that were frozen when the optimizer was wrapped are trained later."""
    for groups in (None, 2):
        model = Model()
        for p in model.first.parameters():
            p.requires_grad_(False)
        optimizer = wrapped(model, groups=groups)
        train(optimizer, model, 1)
        for p in model.first.parameters():
            p.requires_grad_(True)
        train(optimizer, model, 2)
        if hvd.size() > 1:
            assert len(optimizer._requires_update) == 6
        same_everywhere(model.parameters())


def check_zero_grad():
    for arguments in ({}, {"set_to_none": True}, {"set_to_none": False}):
        model = Model()
        optimizer = wrapped(model)
        for x in batches(3):
            loss(model, x[hvd.rank()]).backward()
            optimizer.step()
            optimizer.zero_grad(**arguments)
            kept = arguments.get("set_to_none", True) is False
            assert all((p.grad is not None) == kept for p in model.first.parameters())
        equal(model, joined(3), **CLOSE)


def check_replaced_gradients():
    """The program replaces gradients before the step."""
    model = Model()
    optimizer = wrapped(model)
    for x in batches(2):
        optimizer.zero_grad()
        loss(model, x[hvd.rank()]).backward()
        model.first.weight.grad = model.first.weight.grad.clone()
        model.second.weight.grad = None
        if hvd.size() == 1:
            return
        optimizer.step()
    equal(model, joined(2), **CLOSE)


# ---- every optimizer, every dtype, compression ----------------------------------------------------------------------


def check_all_optimizers():
    """Each rank uses another part of the model, and step also reduces gradients that this rank does not have."""
    if hvd.size() == 1:
        return
    kinds = sorted(torch.optim.Optimizer.__subclasses__(), key=lambda kind: kind.__name__)
    left_out = (torch.optim.LBFGS, torch.optim.SparseAdam)
    if hasattr(torch.optim, "Muon"):
        left_out += (torch.optim.Muon,)  # supports matrices only
    kinds = [k for k in kinds if k.__module__.startswith("torch.optim") and k not in left_out]
    assert len(kinds) > 8
    x = torch.randn(16, 4).requires_grad_()
    for kind in kinds:
        known = inspect.signature(kind.__init__).parameters
        options = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "centered": True}
        model = Model()
        optimizer = wrapped(model, kind, {k: v for k, v in options.items() if k in known})
        hidden = torch.relu(model.first(x))
        output = model.second(hidden)
        if hvd.rank() > 0:
            output = output.detach() * model.unused(torch.ones(3)).sum()
        F.mse_loss(output, torch.ones(16, 2)).backward()
        optimizer.step()
        same_everywhere(model.parameters())


def check_bfloat16():
    for options in ({}, {"groups": 2}, {"compression": hvd.Compression.bf16}, {"op": hvd.Sum}):
        model = Model().bfloat16()
        optimizer = wrapped(model, **options)
        for x in batches(3):
            optimizer.zero_grad()
            loss(model, x[hvd.rank()].bfloat16()).backward()
            optimizer.step()
        assert all(p.grad.dtype == torch.bfloat16 for p in model.first.parameters())
        same_everywhere(model.parameters())
        expected = joined(3, op=options.get("op", hvd.Average))
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p.float(), q, rtol=0.05, atol=0.05)
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    for operation in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0)):
        output = operation(x)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        assert x.grad.dtype == torch.bfloat16


def check_own_compression():
    class Packed(hvd.Compression.none):
        """A compressor with another dtype, another shape, and a different context in each call."""

        count = 0

        @classmethod
        def compress(cls, tensor):
            cls.count += 1
            return (tensor.double().flatten() * cls.count)[None], (tensor.shape, cls.count)

        @staticmethod
        def decompress(tensor, ctx):
            shape, count = ctx
            return (tensor[0] / count).view(shape).float()

    class InPlace(hvd.Compression.none):
        """A compressor that sends the gradient itself."""

        @staticmethod
        def compress(tensor):
            return tensor.mul_(4), None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor / 4

    class Instance:
        def __init__(self, factor):
            self.factor = factor

        def compress(self, tensor):
            return tensor * self.factor, None

        def decompress(self, tensor, ctx):
            return tensor / self.factor

    class Halved(hvd.Compression.fp16):
        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx) * 1

    for compression in (Packed, InPlace, Instance(8), Halved):
        for groups in (None, 2):
            model = Model()
            Packed.count = 0
            train(wrapped(model, compression=compression, groups=groups), model, 3)
            close = {"rtol": 2e-3, "atol": 2e-3} if compression is Halved else CLOSE
            equal(model, joined(3), **close)


# ---- recipes --------------------------------------------------------------------------------------------------------


def check_clipping_warns_once():
    model = Model()
    optimizer = wrapped(model)
    loss(model, torch.ones(6, 4)).backward()
    optimizer.synchronize()
    before = model.first.weight.grad.abs().sum()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert model.first.weight.grad.abs().sum() < before
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(seen) == 1
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(seen[0].message)


def check_amp():
    """GradScaler with clipping; one step is skipped because of an overflow on one rank."""

    def steps(model, optimizer, scaler, backward):
        scales = []
        for step, xs in enumerate(batches(6)):
            optimizer.zero_grad()
            backward(model, xs, step == 3)
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if hasattr(optimizer, "synchronize"):
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def scaled(model, x, overflows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model, x).float()
        return value * float("inf") if overflows else value

    def of_one(model, xs, overflows):
        mine = overflows and hvd.rank() == hvd.size() - 1
        scalers[0].scale(scaled(model, xs[hvd.rank()], mine)).backward()

    def of_all(model, xs, overflows):
        for r, x in enumerate(xs):
            value = scaled(model, x, overflows and r == hvd.size() - 1)
            scalers[1].scale(value / hvd.size()).backward()
        for p in model.unused.parameters():
            p.grad = torch.zeros_like(p)

    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    model, alone = Model(), Model()
    options = {"lr": 0.1, "momentum": 0.9}
    scales = steps(model, wrapped(model), scalers[0], of_one)
    assert scales == steps(
        alone, torch.optim.SGD(alone.parameters(), **options), scalers[1], of_all
    )
    assert scales[3] < scales[2], "the step was not skipped"
    equal(model, alone, rtol=1e-2, atol=1e-3)


def check_early_changes(options):
    """A program that changes gradients while they are reduced is told once, and what to call."""

    def clip(model, optimizer, scaler):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def clip_values(model, optimizer, scaler):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()

    def multiply(model, optimizer, scaler):
        with torch.no_grad():
            model[2].bias.grad *= 2
        optimizer.step()

    def unscale(model, optimizer, scaler):
        scaler.step(optimizer)
        scaler.update()

    def in_time(model, optimizer, scaler):
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    def step(model, optimizer, scaler):
        optimizer.step()

    for change in (clip, clip_values, multiply, unscale, in_time, step):
        is_early = change not in (in_time, step)
        layers = Model()
        # All parameters are used, so that all gradients are submitted in backward.
        model = torch.nn.Sequential(layers.first, torch.nn.Tanh(), layers.second)
        # With fused=True the scaler does not unscale, but it looks for infinite gradients too early.
        fused = {"fused": not options}
        optimizer = wrapped(model, kind=torch.optim.AdamW, options=fused, **options)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                scaler.scale(loss(model, batches(1)[0][hvd.rank()])).backward()
                change(model, optimizer, scaler)
                # In buckets, gradients stay where they are from one step to the next.
                optimizer.zero_grad(set_to_none=not options)
        texts = [str(w.message) for w in seen if "optimizer.synchronize()" in str(w.message)]
        assert len(texts) == (1 if is_early and hvd.size() > 1 else 0), (change, seen)
        for text in texts:
            assert "changed between backward() and step()" in text
            assert "\n" not in text
            assert change is not multiply or "gradient of 2.bias" in text
        del optimizer


def check_early_changes_everywhere():
    for options in ({}, {"groups": 2}, {"gradient_as_bucket_view": True}):
        check_early_changes(options)


def check_copies():
    """A copy of a model and its optimizer trains as the original does, and independently of it."""
    for options in ({}, {"groups": 2}, {"gradient_as_bucket_view": True}, {"op": hvd.Adasum}):
        if options.get("op") == hvd.Adasum and hvd.size() == 3:
            continue
        model = Model()
        groups = [[model.first.weight, model.second.bias]] if options == {"groups": 2} else None
        optimizer = wrapped(model, **(options | ({"groups": groups} if groups else {})))
        train(optimizer, model, 2)
        start = [p.detach().clone() for p in model.parameters()]
        twin, copied = copy.deepcopy((model, optimizer))
        assert type(copied) is type(optimizer)
        assert copied.param_groups[0]["params"][0] is twin.first.weight
        train(copied, twin, 2)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
        train(optimizer, model, 2)
        equal(twin, model, rtol=0, atol=0)
        for refused_copy in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"state_dict\(\).*copy.deepcopy") as caught:
                refused_copy(optimizer)
            assert "\n" not in str(caught.value)
        del optimizer, copied


def check_broadcast_of_new_optimizer():
    """Broadcasting an optimizer without state makes gradients zero, except those of frozen parameters."""
    model = Model()
    model.first.bias.requires_grad_(False)
    optimizer = wrapped(model)
    before = [p.detach().clone() for p in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert model.first.bias.grad is None
    assert torch.equal(hvd.broadcast(model.second.bias.grad, 0), torch.zeros(2))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def check_compiled(backend):
    """Compiled models without graph breaks, and a compiled step."""
    torch._dynamo.reset()
    model = Model()
    optimizer = wrapped(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for x in batches(3):
        optimizer.zero_grad()
        (compiled(x[hvd.rank()]) ** 2).mean().backward()
        assert hvd.size() == 1 or len(optimizer._handles) == 4
        optimizer.step()
    equal(model, joined(3), **CLOSE)

    model = Model()
    optimizer = wrapped(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    step = torch.compile(optimizer.step, backend=backend)
    for x in batches(3):
        optimizer.zero_grad()
        (compiled(x[hvd.rank()]) ** 2).mean().backward()
        step()
    equal(model, joined(3), **CLOSE)

    torch.manual_seed(0)
    norm = torch.nn.Sequential(torch.nn.Linear(4, 4), hvd.SyncBatchNorm(4))
    x = batches(1)[0][hvd.rank()]
    expected = norm(x)
    torch.testing.assert_close(torch.compile(norm, backend=backend)(x), expected, **CLOSE)
    torch._dynamo.reset()


CHECKS = [
    check_no_sync,
    check_no_sync_and_passes,
    check_no_sync_too_late,
    check_no_sync_only_before,
    check_no_sync_sparse,
    check_overlap,
    check_handles,
    check_two_optimizers,
    check_documented_gan,
    check_documented_allgather,
    check_failed_backward,
    check_checkpointing,
    check_requires_grad_changes,
    check_thawed,
    check_zero_grad,
    check_replaced_gradients,
    check_all_optimizers,
    check_bfloat16,
    check_own_compression,
    check_clipping_warns_once,
    check_amp,
    check_early_changes_everywhere,
    check_copies,
    check_broadcast_of_new_optimizer,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.short("aa-*")
def test_optimizer_recipes(ranks, check):
    ranks.run(check)


def test_compiled_models_and_steps(pool):
    with pool.ranks(2) as ranks:
        ranks.run(check_compiled, "aot_eager", timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_models_compiled_to_cpp(pool):
    with pool.ranks(2) as ranks:
        ranks.run(check_compiled, "inductor", timeout=380)


def check_elastic_alone():
    """In an elastic job, a single rank runs the same code as several."""
    for options in ({}, {"groups": 2}):
        model = Model()
        optimizer = wrapped(model, **options)
        assert len(optimizer._requires_update) == 6
        assert len(optimizer._grad_accs) == 6
        loss(model, batches(1)[0][0]).backward()
        assert optimizer._handles
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        assert not optimizer._handles
        assert torch.equal(model.unused.weight.grad, torch.zeros(3, 3))
        equal(model, joined(1), **CLOSE)
        del optimizer


def test_optimizer_in_an_elastic_job(pool):
    with pool.ranks(1, env={"HOROVOD_ELASTIC": "1"}) as ranks:
        ranks.run(check_elastic_alone)
    with pool.ranks(2, env={"HOROVOD_ELASTIC": "1"}) as ranks:
        ranks.run(check_no_sync)
