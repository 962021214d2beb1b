"""Training on N processes equals training in one process with the whole batch; and the training example."""

import gzip
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import horoplug.torch as hvd
from tests.harness import OPTIONAL, ROOT
from tests.harness.support import NO_LIMITS, run_script, seed
from tests.harness.train_example import TRAIN, summary, write_fashion_mnist

pytest_plugins = ["tests.harness.jobs"]

STEPS, BATCH = 12, 24  # the batch can be divided by 2, 3 and 4


def network(key, dtype=torch.float32):
    """A smooth network: with a maximum, the last bit of a sum might decide which weight gets a gradient."""
    torch.manual_seed(key)
    made = nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.Softplus(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 5 * 5, 20),
        nn.Tanh(),
        nn.Linear(20, 4),
    )
    return made.to(dtype)


# Name: (optimizer, dtype, relative and absolute tolerance). Adam divides by the magnitude of a gradient, which
# amplifies the rounding errors of tiny gradients: float32 is too coarse to compare it.
OPTIMIZERS = {
    "sgd": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        torch.float32,
        (1e-3, 1e-5),
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.003), torch.float64, (1e-7, 1e-9)),
}
OPTIONS = {
    "plain": {},
    "groups": {"groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "two passes": {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0},
}


def data(key, dtype=torch.float32):
    made = torch.Generator().manual_seed(key)
    images = torch.randn(STEPS, BATCH, 1, 12, 12, generator=made).to(dtype)
    return images, torch.randint(0, 4, (STEPS, BATCH), generator=made)


def alone(kind, key):
    """Parameters after training in one process, without horoplug."""
    make, dtype, _ = OPTIMIZERS[kind]
    model = network(key, dtype)
    optimizer = make(model.parameters())
    for images, labels in zip(*data(key, dtype), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def distributed(kind, options, key):
    """Train on this rank's part of every batch. Returns the parameters and their bytes."""
    size, rank = hvd.size(), hvd.rank()
    make, dtype, _ = OPTIMIZERS[kind]
    model = network(key + rank, dtype)  # initial parameters differ until the broadcast
    optimizer = make(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    passes = options.get("backward_passes_per_step", 1)
    for images, labels in zip(*data(key, dtype), strict=True):
        optimizer.zero_grad()
        mine = images[rank::size].chunk(passes), labels[rank::size].chunk(passes)
        for x, y in zip(*mine, strict=True):
            (F.cross_entropy(model(x), y) / passes).backward()
        optimizer.step()
    parameters = [p.detach() for p in model.parameters()]
    return parameters, b"".join(p.numpy().tobytes() for p in parameters)


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aaa", "aab", "aaaa", "abab"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_training_in_one_process(pool, hosts, kind):
    key = seed()
    expected = alone(kind, key)
    relative, absolute = OPTIMIZERS[kind][2]
    with pool.ranks(len(hosts), hosts=hosts) as ranks:
        for options in OPTIONS.values():
            results = ranks.run(distributed, kind, options, key)
            assert len({bits for _, bits in results}) == 1, "ranks have different parameters"
            for actual, right in zip(results[0][0], expected, strict=True):
                torch.testing.assert_close(actual, right, rtol=relative, atol=absolute)


@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_training_gives_the_same_bits_in_every_run(pool, hosts):
    key = seed()
    with pool.ranks(len(hosts), hosts=hosts) as ranks:
        first, second = (ranks.run(distributed, "adam", {}, key)[0][1] for _ in range(2))
        assert first == second


def die_in_backward(victim, step_of_death):
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step, (images, labels) in enumerate(zip(*data(0), strict=True)):
        if step == step_of_death and hvd.rank() == victim:
            model[4].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
@pytest.mark.short(failure=True)
def test_killed_rank_is_reported_in_the_middle_of_a_step(pool, hosts):
    """The other ranks get the error from backward() or step()."""
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as ranks:
        outcomes = ranks.outcomes(die_in_backward, 1, 3)
        assert outcomes[1].died
        for outcome in [outcomes[0], *outcomes[2:]]:
            assert outcome.kind == "HorovodInternalError", str(outcome)
            assert "rank 1" in outcome.message


def with_data_loader():
    """A data loader forks workers while the engine runs."""
    dataset = TensorDataset(torch.arange(40.0))
    total = 0.0
    for (part,) in DataLoader(dataset, batch_size=4, num_workers=2):
        total += hvd.allreduce(part, op=hvd.Sum).sum().item()
    return total


@pytest.mark.parametrize("hosts", ["a", "aa", "ab"])
def test_training_with_data_loader_workers(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as ranks:
        assert ranks.run(with_data_loader) == [780.0 * len(hosts)] * len(hosts)


# ---- examples/pytorch/train.py --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.short
def test_example_learns(tmp_path, size):
    write_fashion_mnist(tmp_path)
    options = ["--epochs", "4", "--batch-size", str(16 // size), "--lr", str(0.05 / size)]
    done = run_script(TRAIN, "--data-dir", str(tmp_path), "--json", *options, size=size)
    result = summary(done)
    assert (result["data"], result["processes"], len(result["epochs"])) == (
        "Fashion-MNIST",
        size,
        4,
    )
    last = result["epochs"][-1]
    assert last["accuracy"] > 0.9, "it has not learned"
    assert last["loss"] < result["epochs"][0]["loss"] / 2
    assert last["images_per_second"] == pytest.approx(size * last["images_per_second_per_process"])
    assert "images/s per process" in done[0].stdout


def test_example_refuses_files_of_another_format(tmp_path):
    write_fashion_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    (done,) = run_script(TRAIN, "--data-dir", str(tmp_path))
    assert done.returncode != 0
    assert "not an IDX file" in done.stderr


def test_example_trains_on_digits(monkeypatch):
    """Without Fashion-MNIST, the example uses scikit-learn's digits."""
    monkeypatch.syspath_prepend(OPTIONAL)
    import importlib.util

    specification = importlib.util.spec_from_file_location("train", TRAIN)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(module, "DEBIAN", ROOT / "no such folder")
    found = module.load(None, 100)
    assert found.name == "digits"
    assert found.images.shape == (100, 1, 8, 8)
    assert found.test_images.shape == (360, 1, 8, 8)
    assert module.Network()(found.images).shape == (100, 10)
