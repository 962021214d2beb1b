"""Tests that every framework has; a framework supplies the check functions that run on the ranks. The tests need the
module's fixture ``ranks``."""

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
    """A test of a function of (dtype, op, key) that returns the bits which it has seen."""

    @pytest.mark.parametrize("dtype", dtypes)
    @pytest.mark.parametrize("op", REDUCTIONS)
    def test_allreduce(ranks, dtype, op):
        if (dtype, op) == ("bool", "Average"):
            pytest.skip("refused: see the tests of refusals")
        seen = ranks.run(check, dtype, REDUCTIONS[op], seed())
        assert all(bits == seen[0] for bits in seen), "ranks have different bits"

    return test_allreduce


def gradient_test(*checks):
    """A test of functions of (key), one at a time."""

    @pytest.mark.parametrize("check", checks)
    def test_gradient(ranks, check):
        ranks.run(check, seed())

    return test_gradient


def exchanged(values, rank):
    """How a rank splits its rows for alltoall, which then receives as many from each, and the rows that it gets.
    ``values``: of every rank; it uses none or one row for each rank."""
    size = len(values)
    splits = [(rank + r) % 2 for r in range(size)]
    parts = []
    for r in range(size):
        theirs = [(r + s) % 2 for s in range(size)]
        parts.append(values[r][sum(theirs[:rank]) : sum(theirs[: rank + 1])])
    return splits, parts
