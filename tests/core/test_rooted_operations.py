"""reduce, gather and scatter on NumPy arrays."""

import os
import random
import signal

import numpy as np
import pytest

import horoplug as hvd
from tests.harness.checks.errors import errors_of_survivors, internal, refused
from tests.harness.checks.rooted import check_rooted
from tests.harness.support import NO_LIMITS, ranks_fixture, seed

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aa", "ab", "aab", "abab")


def check_in_sets(key):
    check_rooted(key)
    if hvd.size() == 1:
        return
    members = sorted(random.Random(key).sample(range(hvd.size()), hvd.size() - 1))
    some = hvd.add_process_set(members)
    check_rooted(key + 1, some, members)
    hvd.remove_process_set(some)


@pytest.mark.short("aa*")
def test_reduce_gather_and_scatter_results(ranks):
    ranks.run(check_in_sets, seed())


def check_average_and_factors():
    size, rank = hvd.size(), hvd.rank()
    data = np.full(7, rank + 1, np.float64)
    found = hvd.reduce(data, size - 1, prescale_factor=2.0, postscale_factor=3.0)
    expected = 6 * (size + 1) / 2 if rank == size - 1 else rank + 1
    np.testing.assert_allclose(found, expected)
    assert hvd.gather(np.float32(rank), 0).tolist() == (list(range(size)) if rank == 0 else [])


def test_reduce_with_average_and_scale_factors(ranks):
    ranks.run(check_average_and_factors)


def check_refusals():
    data = np.ones(4)
    refused(ValueError, "root rank 9 does not exist", lambda: hvd.reduce(data, 9))
    refused(NotImplementedError, "reduce does not support", lambda: hvd.reduce(data, 0, hvd.Adasum))
    refused(ValueError, "needs a first dimension", lambda: hvd.scatter(np.float64(1), 0))
    refused(ValueError, "average", lambda: hvd.reduce(np.ones(2, bool), 0))


def test_invalid_rooted_calls_are_refused(ranks):
    ranks.run(check_refusals)


def disagree():
    hvd.reduce(np.ones(3), min(hvd.rank(), 1), name="r")


@pytest.mark.short(failure=True)
def test_mismatched_roots_are_an_error_on_every_rank(pool):
    with pool.ranks(2) as job:
        internal(job.outcomes(disagree), "mismatched root rank", "0 on rank 0", "1 on rank 1")
        job.run(check_average_and_factors)


def die(victim):
    for step in range(1000):
        if hvd.rank() == victim and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        data = np.ones(100_000)
        hvd.reduce(data, 0, name="reduced")
        hvd.gather(data, 1, name="gathered")
        hvd.scatter(data, 0, name="scattered")


@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_killed_rank_is_named_by_the_survivors(pool, hosts):
    victim = random.Random(seed()).randrange(len(hosts))
    with pool.ranks(len(hosts), hosts=hosts, env=NO_LIMITS) as job:
        internal(errors_of_survivors(job.outcomes(die, victim), victim))
