"""Many operations in flight: random programs with a different order on every rank, and small and large arrays."""

import random

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.arrays import PLACES, same
from tests.harness.support import ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture(*PLACES)


def check_async(key):
    """Many operations of all kinds are in flight, submitted in a different order on every rank."""
    size, rank = hvd.size(), hvd.rank()
    draw = random.Random(key + rank)
    jobs = [
        (kind, n) for kind in ("reduce", "gather", "root", "exchange", "scatter") for n in range(20)
    ]
    draw.shuffle(jobs)
    handles = {}
    for kind, n in jobs:
        x = np.full((size, n + 1), rank + n, np.float32)
        handles[kind, n] = {
            "reduce": lambda x=x, n=n: hvd.allreduce_async(x, name=f"n{n}", op=hvd.Max),
            "gather": lambda x=x, n=n: hvd.allgather_async(x[:1], name=f"n{n}"),
            "root": lambda x=x, n=n: hvd.broadcast_async(x, n % size, name=f"n{n}"),
            "exchange": lambda x=x, n=n: hvd.alltoall_async(x, name=f"n{n}"),
            "scatter": lambda x=x, n=n: hvd.reducescatter_async(x, name=f"n{n}"),
        }[kind]()
    draw.shuffle(jobs)
    for kind, n in jobs:
        handle = handles[kind, n]
        assert isinstance(handle, int)
        output = hvd.synchronize(handle)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle) is None, "a handle is freed by synchronize"
        every = np.arange(size, dtype=np.float32)[:, None] + n + np.zeros((1, n + 1), np.float32)
        expected = {
            "reduce": every[-1:].repeat(size, 0),
            "gather": every,
            "root": every[n % size][None].repeat(size, 0),
            "exchange": every,
            "scatter": every.mean(0, keepdims=True),
        }[kind]
        same(output[0] if kind == "exchange" else output, expected, "float32")
    assert hvd.synchronize(10**9) is None


def test_many_operations_in_flight(ranks):
    ranks.run(check_async, seed())


def check_program(key):
    """Steps of random operations in a different order on every rank. From step to step, tensors are added, removed,
    changed and repeated."""
    size, rank = hvd.size(), hvd.rank()
    shared, own = random.Random(key), random.Random(key + rank + 1)
    program = []
    for step in range(30):
        if step % 10 == 0 or shared.random() < 0.1:  # otherwise the previous step is repeated
            kinds = ["sum", "min", "group", "gather", "root", "exchange", "scatter"]
            program = [
                (
                    f"t{n}",
                    shared.choice(kinds),
                    shared.choice(["f4", "f8", "i4", "u1"]),
                    shared.choice([1, 3, 100, 5000]),
                )
                for n in range(shared.randrange(1, 25))
            ]
        window = shared.choice([1, 3, len(program)])
        for start in range(0, len(program), window):
            part = program[start : start + window]
            own.shuffle(part)
            handles = [(item, submit_one(*item, rank, size, step)) for item in part]
            own.shuffle(handles)
            for item, handle in handles:
                verify_one(*item, hvd.synchronize(handle), rank, size, step)


def submit_one(name, kind, dtype, count, rank, size, step):
    x = np.full((size, count), rank + step % 5, dtype)
    match kind:
        case "sum":
            return hvd.allreduce_async(x, op=hvd.Sum, name=name)
        case "min":
            return hvd.allreduce_async_(x, op=hvd.Min, name=name)
        case "group":
            return hvd.grouped_allreduce_async([x, x[:1]], op=hvd.Max, name=name)
        case "gather":
            return hvd.allgather_async(x[: rank + 1], name=name)
        case "root":
            return hvd.broadcast_async(x, count % size, name=name)
        case "exchange":
            return hvd.alltoall_async(x, name=name)
    return hvd.reducescatter_async(x, op=hvd.Sum, name=name)


def verify_one(name, kind, dtype, count, output, rank, size, step):
    base = step % 5
    if kind in ("group", "exchange"):
        output = output[0]
    rows = {
        "sum": [sum(base + r for r in range(size))] * size,
        "min": [base] * size,
        "group": [base + size - 1] * size,
        "gather": [base + r for r in range(size) for _ in range(r + 1)],
        "root": [base + count % size] * size,
        "exchange": [base + r for r in range(size)],
        "scatter": [sum(base + r for r in range(size))],
    }[kind]
    assert output.dtype == dtype
    assert output.shape == (len(rows), count)
    assert (output == np.array(rows, dtype)[:, None]).all(), (name, kind, dtype, count, step)


@pytest.mark.short("aa*")
def test_random_programs(ranks):
    key = seed()
    for n in range(3):
        ranks.run(check_program, key + n)


@pytest.mark.parametrize(
    "knob",
    [
        {"HOROVOD_FUSION_THRESHOLD": "0"},
        {"HOROVOD_FUSION_THRESHOLD": "4096"},
        {"HOROVOD_CACHE_CAPACITY": "0"},
        {"HOROVOD_CACHE_CAPACITY": "3"},
        {"HOROVOD_STALL_CHECK_DISABLE": "1"},
    ],
    ids=lambda knob: "-".join(*knob.items()),
)
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_random_programs_with_random_settings(pool, hosts, knob):
    with pool.ranks(3, hosts=hosts, env=knob) as job:
        job.run(check_program, seed())


def check_large():
    """Arrays that exceed every internal buffer."""
    size, rank = hvd.size(), hvd.rank()
    x = np.arange(12_000_001, dtype=np.float32) % 1000 + rank
    total = (np.arange(12_000_001, dtype=np.float32) % 1000) * size + sum(range(size))
    assert np.array_equal(hvd.allreduce(x, op=hvd.Sum), total)
    gathered = hvd.allgather(x)
    assert gathered.shape == (size * len(x),)
    assert gathered[:: len(x)].tolist() == list(range(size))
    assert np.array_equal(hvd.broadcast(x, 1), x - rank + 1)
    own = 12_000_000 // size
    swapped = hvd.alltoall(x[: size * own])
    assert swapped[::own].tolist() == [(rank * own) % 1000 + r for r in range(size)]


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_arrays_larger_than_the_fusion_buffer(pool, hosts):
    with pool.ranks(len(hosts), hosts=hosts) as job:
        job.run(check_large)


def check_poll():
    handle = hvd.allreduce_async(np.ones(1000))
    while not hvd.poll(handle):
        pass
    return hvd.synchronize(handle)[0]


@pytest.mark.short("aa*")
def test_poll_reports_completion(ranks):
    assert ranks.run(check_poll) == [1.0] * ranks.size
