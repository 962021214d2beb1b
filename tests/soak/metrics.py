"""Random metrics of a soak test: numbers and arrays, some of which the ranks cannot average."""

import random

import numpy as np

import horoplug as hvd
from horoplug.numpy.metrics import MetricAverages

SHAPES = ((), (), (1,), (3,), (10,), (4, 5), (0,), (2, 1, 3))
DTYPES = ("f2", "f4", "f8", "i8", "u1", "?")


def check_metrics(draw: random.Random) -> int:
    """Average some metrics over all ranks for some epochs. ``draw``: the same on all ranks. Returns the number of
    metrics that were checked."""
    rank, size = hvd.rank(), hvd.size()
    averages, checked = MetricAverages("the soak test"), 0
    for _ in range(draw.randint(1, 3)):
        weights = [draw.choice([0, 1, 7]) for _ in range(size)]
        if not any(weights):
            weights[draw.randrange(size)] = 1
        values: dict[str, object] = {}
        expected: dict[str, np.ndarray] = {}
        for number in range(draw.randint(1, 8)):
            name, shape, kind = f"m{number}", draw.choice(SHAPES), draw.choice(DTYPES)
            numbers = np.random.default_rng(draw.randrange(2**31))
            every = [(numbers.random(shape) * 100).astype(kind) for _ in range(size)]
            fault, victim = draw.choice([None, None, "shape", "text"]), draw.randrange(size)
            values[name] = every[rank] if shape else every[rank].item()
            if fault and rank == victim:
                values[name] = np.zeros((7, 7)) if fault == "shape" else "good"
            # What a rank without rows has does not count.
            disagree = [r for r in range(size) if weights[r] and r != victim]
            if not fault or not weights[victim] or (fault == "shape" and not disagree):
                if fault == "shape" and weights[victim] and not disagree:
                    every = [np.zeros((7, 7))] * size
                weighted = [w * e.astype("f8") for w, e in zip(weights, every, strict=True) if w]
                expected[name] = np.sum(weighted, axis=0) / sum(weights)
        found = averages(values, weight=weights[rank])
        assert found.keys() == expected.keys(), (found, expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
        checked += len(expected)
    return checked
