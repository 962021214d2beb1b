"""allreduce with op=Adasum against a float64 reference: frameworks, dtypes, variants, transports."""

import numpy as np
import pytest
import torch

import horoplug as hvd
import horoplug.torch as hvd_torch
from tests.harness.adasum_reference import adasum
from tests.harness.support import seed

pytest_plugins = ["tests.harness.jobs"]

# The host of each rank, and the forced algorithm.
JOBS = [
    ("a", ""),
    ("aa", ""),
    ("aa", "adasum_halving"),
    ("ab", ""),
    ("aaaa", ""),
    ("aaaa", "adasum_halving"),
    ("aaaa", "adasum_doubling"),
    ("abab", ""),
]
# Tolerances for a single rounding to the dtype; intermediate results are float32 or float64.
TOLERANCE = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 3e-6, "float64": 1e-13}
SHAPES = [(), (0,), (7,), (33, 5), (200, 300)]


@pytest.fixture(scope="module", params=JOBS, ids="-".join)
def ranks(request, pool):
    places, algorithm = request.param
    env = {"HOROPLUG_ALGORITHM": algorithm} if algorithm else None
    with pool.ranks(len(places), hosts=places, env=env) as job:
        yield job


def inputs(shape, key):
    """A float64 tensor for every rank; the tensors are partly parallel."""
    random = np.random.default_rng(key)
    return random.normal(size=shape) + random.normal(size=(hvd.size(), *shape)) / 2


def close(actual, expected, dtype):
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=1.01 * TOLERANCE[dtype], atol=3e-6
    )


def same_everywhere(array):
    everywhere = hvd.allgather_object(np.asarray(array).tobytes())
    assert everywhere == [everywhere[0]] * hvd.size(), "ranks have different bits"


def check_numpy(key):
    rank = hvd.rank()
    for dtype in ["float16", "float32", "float64"]:
        for shape in SHAPES:
            given = inputs(shape, key).astype(dtype)
            expected = adasum(given)
            x = given[rank].copy()
            result = hvd.allreduce(x, op=hvd.Adasum)
            assert result.dtype == x.dtype
            assert result.shape == shape
            close(result, expected, dtype)
            same_everywhere(result)
            np.testing.assert_array_equal(x, given[rank])
            if shape:
                assert hvd.allreduce_(x, op=hvd.Adasum) is x
                np.testing.assert_array_equal(x, result)
                again = hvd.synchronize(hvd.allreduce_async(given[rank].copy(), op=hvd.Adasum))
                np.testing.assert_array_equal(again, result)


def check_torch(key):
    rank = hvd.rank()
    for name in TOLERANCE:
        for shape in SHAPES:
            given = torch.from_numpy(np.asarray(inputs(shape, key))).to(getattr(torch, name))
            expected = adasum(given.double().numpy())
            result = hvd_torch.allreduce(given[rank], op=hvd_torch.Adasum)
            assert result.dtype == given.dtype
            assert result.shape == shape
            close(result.double().numpy(), expected, name)
            same_everywhere(result.double().numpy())
            x = given[rank].clone()
            assert hvd_torch.allreduce_(x, op=hvd_torch.Adasum) is x
            assert torch.equal(x, result)


def check_groups(key):
    """Each tensor of a group is a separate vector, with the same bits as in a single call."""
    rank = hvd.rank()
    given = [inputs(shape, key + n).astype("float32") for n, shape in enumerate(SHAPES)]
    mine = [np.array(of_ranks[rank]) for of_ranks in given]
    results = hvd.grouped_allreduce(mine, op=hvd.Adasum)
    for result, of_ranks, tensor in zip(results, given, mine, strict=True):
        close(result, adasum(of_ranks), "float32")
        np.testing.assert_array_equal(result, hvd.allreduce(tensor, op=hvd.Adasum))
    # A group with several dtypes, in place.
    tensors = [torch.from_numpy(mine[3].copy()), torch.from_numpy(mine[4]).double()]
    out = hvd_torch.grouped_allreduce_(tensors, op=hvd_torch.Adasum)
    assert torch.equal(out[0], torch.from_numpy(np.array(results[3])))
    close(out[1], adasum(given[4].astype("float64")), "float64")
    # Single operations that may be fused.
    handles = [hvd.allreduce_async(t, name=f"t{n}", op=hvd.Adasum) for n, t in enumerate(mine)]
    for handle, result in zip(handles, results, strict=True):
        np.testing.assert_array_equal(hvd.synchronize(handle), result)


def check_factors(key):
    given = inputs((65, 3), key).astype("float32")
    result = hvd.allreduce(
        given[hvd.rank()], op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0
    )
    close(result, 3 * adasum(0.5 * given), "float32")
    half = hvd_torch.allreduce(
        torch.from_numpy(given[hvd.rank()]),
        op=hvd_torch.Adasum,
        compression=hvd_torch.Compression.fp16,
    )
    assert half.dtype == torch.float32
    np.testing.assert_allclose(half.numpy(), adasum(given), rtol=2e-2, atol=2e-2)


def check_meaning(key):
    size, rank = hvd.size(), hvd.rank()
    x = np.random.default_rng(key).integers(-8, 8, 4096).astype("float32")
    np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Adasum), x)  # the average
    own = np.where(np.arange(4096) % size == rank, x, 0)
    np.testing.assert_array_equal(hvd.allreduce(own, op=hvd.Adasum), x)  # the sum
    alone = x if rank == size - 1 else np.zeros_like(x)
    np.testing.assert_array_equal(hvd.allreduce(alone, op=hvd.Adasum), x)


def check_gradient(key):
    """The gradient is the same operation on the gradients, as in Horovod."""
    weights = inputs((5, 3), key)
    for grouped in (False, True):
        x = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
        y = (
            hvd_torch.grouped_allreduce([x], op=hvd_torch.Adasum)[0]
            if grouped
            else hvd_torch.allreduce(x, op=hvd_torch.Adasum)
        )
        (y * torch.from_numpy(weights[hvd.rank()])).sum().backward()
        close(x.grad.numpy(), adasum(weights), "float64")


CHECKS = [
    check_numpy,
    check_torch,
    check_groups,
    check_factors,
    check_meaning,
    check_gradient,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.short("aa-*")
def test_adasum_matches_the_reference(ranks, check):
    ranks.run(check, seed())


def check_three():
    x = np.ones(4, np.float32)
    for call in [
        lambda: hvd.allreduce(x, op=hvd.Adasum),
        lambda: hvd_torch.allreduce_async_(torch.ones(4), op=hvd_torch.Adasum),
        lambda: hvd_torch.DistributedOptimizer(
            torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), op=hvd_torch.Adasum
        ),
    ]:
        with pytest.raises(NotImplementedError, match=r"3 ranks.*power of two") as caught:
            call()
        assert "\n" not in str(caught.value)
    assert (hvd.allreduce(x) == 1).all()


def test_adasum_refuses_rank_counts_that_are_not_a_power_of_two(pool):
    with pool.ranks(3) as ranks:
        ranks.run(check_three)
