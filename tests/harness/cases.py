"""Tests that all frameworks share. The framework's module supplies the check functions, which run on the ranks, and
the fixture ``ranks``."""

import pytest

import horoplug as hvd
from tests.harness.support import seed

REDUCTIONS = {
    "Average": hvd.Average,
    "Sum": hvd.Sum,
    "Min": hvd.Min,
    "Max": hvd.Max,
    "Product": hvd.Product,
}


def allreduce_test(check, dtypes):
    """A test that calls ``check(dtype, op, key)`` on every rank; the returned bits must be equal on all ranks."""

    @pytest.mark.parametrize("dtype", dtypes)
    @pytest.mark.parametrize("op", REDUCTIONS)
    def test_allreduce(ranks, dtype, op):
        if (dtype, op) == ("bool", "Average"):
            pytest.skip("not supported: the tests of refused calls cover it")
        seen = ranks.run(check, dtype, REDUCTIONS[op], seed())
        assert all(bits == seen[0] for bits in seen), "ranks have different bits"

    return test_allreduce


def gradient_test(*checks):
    """A test that calls each ``check(key)`` on every rank, as a separate case."""

    @pytest.mark.parametrize("check", checks)
    def test_gradient(ranks, check):
        ranks.run(check, seed())

    return test_gradient


def exchanged(values, rank):
    """The splits of a rank for alltoall, which equal its received splits, and the rows that it receives.
    ``values``: the rows of every rank; each rank sends one row to each rank, or none."""
    size = len(values)
    splits = [(rank + r) % 2 for r in range(size)]
    parts = []
    for r in range(size):
        theirs = [(r + s) % 2 for s in range(size)]
        parts.append(values[r][sum(theirs[:rank]) : sum(theirs[: rank + 1])])
    return splits, parts
