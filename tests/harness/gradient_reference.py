"""The gradients of operations, by central differences of the losses of all ranks, computed with NumPy in one process.

Every rank has the loss ``Re(sum(factor * y)) + sum(square * |y|^2) / 2`` of its output ``y``. The losses are quadratic.
Therefore central differences are exact but for rounding."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import horoplug as hvd

Array = np.ndarray[Any, Any]
ROOT = 0


class Kind(NamedTuple):
    """An operation with options.

    Horovod's rules differ from the derivative of the sum of the losses by ``factor``. ``second_factor`` is the factor
    of the rule by which a first derivative is differentiated again."""

    operation: str
    options: dict[str, Any]
    forward: Callable[[Sequence[Array]], list[Array]]  # the outputs of all ranks from their inputs
    factor: Callable[[int], float]
    second_factor: Callable[[int], float]


def _same(value: Array, xs: Sequence[Array]) -> list[Array]:
    return [value] * len(xs)


def _exchange(xs: Sequence[Array]) -> list[Array]:
    parts = [np.split(x, len(xs)) for x in xs]
    return [np.concatenate([part[rank] for part in parts]) for rank in range(len(xs))]


def _one(size: int) -> float:
    return 1.0


def _inverse(size: int) -> float:
    return 1.0 / size


SCALED = {"prescale_factor": 0.5, "postscale_factor": 3.0}
KINDS = (
    Kind("allreduce", {"op": hvd.Average}, lambda xs: _same(sum(xs) / len(xs), xs), _one, _one),
    Kind("allreduce", {"op": hvd.Sum, **SCALED}, lambda xs: _same(1.5 * sum(xs), xs), _one, _one),
    Kind("allgather", {}, lambda xs: _same(np.concatenate(xs), xs), _inverse, _inverse),
    Kind("broadcast", {"root_rank": ROOT}, lambda xs: _same(xs[ROOT], xs), _inverse, _inverse),
    Kind("alltoall", {}, _exchange, _one, _one),
    Kind(
        "reducescatter",
        {"op": hvd.Average},
        lambda xs: np.array_split(sum(xs) / len(xs), len(xs)),
        float,
        _one,
    ),
    Kind(
        "reducescatter",
        {"op": hvd.Sum, **SCALED},
        lambda xs: np.array_split(1.5 * sum(xs), len(xs)),
        float,
        _one,
    ),
)
GROUPED = ("allreduce", "allgather", "reducescatter")


class Case(NamedTuple):
    """The values of all ranks for one kind. Gradients are ``dL/dRe(x) + i dL/dIm(x)``, which is PyTorch's and
    TensorFlow's convention; JAX's is the conjugate."""

    kind: Kind
    inputs: list[Array]
    outputs: list[Array]
    factors: list[Array]  # of the loss; of the shape of the output
    squares: list[Array]  # real
    gradients: list[Array]
    directions: list[Array]  # of the shape of the input
    second: list[Array]  # the gradients of Re(sum(conj(direction) * gradient))


def _values(random: Any, shape: tuple[int, ...], is_complex: bool) -> Array:
    real = random.integers(-4, 5, shape).astype(float)
    return real + 1j * random.integers(-4, 5, shape) if is_complex else real


def _differences(function: Callable[[list[Array]], float], xs: Sequence[Array]) -> list[Array]:
    """The gradient of a quadratic function of the inputs of all ranks."""
    is_complex = np.iscomplexobj(xs[0])
    gradients = [np.zeros_like(x) for x in xs]
    for rank, x in enumerate(xs):
        for index in np.ndindex(x.shape):
            for step in (1.0, 1j) if is_complex else (1.0,):

                def moved(by: Any, rank: int = rank, index: Any = index) -> float:
                    changed = [each.copy() for each in xs]
                    changed[rank][index] += by
                    return function(changed)

                gradients[rank][index] += step * (moved(step) - moved(-step)) / 2
    return gradients


def case(kind: Kind, size: int, key: int, is_complex: bool = True) -> Case:
    """The values for a job of ``size`` ranks, the same on every rank."""
    random = np.random.default_rng(key)
    xs = [_values(random, (2 * size, 2), is_complex) for _ in range(size)]
    outputs = kind.forward(xs)
    factors = [_values(random, y.shape, is_complex) for y in outputs]
    squares = [_values(random, y.shape, False) for y in outputs]
    directions = [_values(random, x.shape, is_complex) for x in xs]

    def loss(xs: list[Array]) -> float:
        return sum(
            (f * y).real.sum() + (s * abs(y) ** 2).sum() / 2
            for f, s, y in zip(factors, squares, kind.forward(xs), strict=True)
        )

    # The derivative of the first gradient, which is linear in the inputs but for a constant.
    weighted = [s * y for s, y in zip(squares, kind.forward(directions), strict=True)]

    def product(xs: list[Array]) -> float:
        pairs = zip(weighted, kind.forward(xs), strict=True)
        return sum((w.conj() * y).real.sum() for w, y in pairs)

    first = [g * kind.factor(size) for g in _differences(loss, xs)]
    both = kind.factor(size) * kind.second_factor(size)
    second = [g * both for g in _differences(product, xs)]
    return Case(kind, xs, outputs, factors, squares, first, directions, second)
