"""NumPy arrays for every rank, and the results that a reduction of them must give."""

import random

import numpy as np

import horoplug as hvd

# Ranks with the same letter share memory; others are connected by TCP.
PLACES = ["a", "aa", "ab", "aaa", "aab", "aaaa", "abab", "abcd"]


def arrays(dtype, shape, key, size):
    """The array of every rank: small values, so that no integer wraps around."""
    made = []
    for rank in range(size):
        values = np.random.default_rng([key, rank])
        if dtype == "bool":
            made.append(values.integers(0, 2, shape).astype(bool))
        elif dtype.startswith("float"):
            made.append(values.uniform(0.5, 2.0, shape).astype(dtype))
        else:
            low = 1 if dtype.startswith("u") else -3
            made.append(values.integers(low, 4, shape).astype(dtype))
    return made


def reduced(inputs, op, dtype):
    """The expected result of the reduction, computed in the widest type."""
    if dtype == "bool":
        both = np.logical_and if op in (hvd.Min, hvd.Product) else np.logical_or
        return both.reduce(inputs)
    wide = [a.astype("float64" if dtype.startswith("float") else "int64") for a in inputs]
    if op == hvd.Average:
        total = np.sum(wide, axis=0)
        return total / len(wide) if dtype.startswith("float") else np.trunc(total / len(wide))
    function = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}[op]
    return function(wide, axis=0)


def same(actual, expected, dtype, shape=None):
    expected = np.asarray(expected)
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == np.dtype(dtype)
    assert actual.shape == (expected.shape if shape is None else shape)
    tolerance = {"float16": 4e-3, "float32": 1e-6, "float64": 1e-14}.get(dtype, 0)
    np.testing.assert_allclose(actual.astype("float64"), expected.astype("float64"), tolerance)
    return actual.tobytes()


def shapes(key):
    """Shapes without elements, with one element, with an odd count, and with enough elements for several chunks and the
    alignment of the fusion buffer."""
    draw = random.Random(key)
    return [
        (),
        (0,),
        (3, 0, 2),
        (1,),
        (draw.randrange(2, 40),),
        (7, draw.randrange(1, 5), 3),
        (50021,),
    ]
