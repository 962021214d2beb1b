"""The rules of differentiation and of vmap for complex, integer and bool arrays, compared with central differences
(tests/harness/gradient_reference.py) and with the operations themselves."""

import numpy as np
import pytest

from tests.harness.checks.jax_ops import WRAPPERS, same
from tests.harness.gradient_reference import GROUPED, KINDS, case
from tests.harness.support import ranks_fixture, seed

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
jnp, lax, float0 = jax.numpy, jax.lax, jax.dtypes.float0

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa")


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-4, atol=1e-3)


def calls(kind):
    """The operation on one array, and where it exists on the second one of a group."""

    def one(x):
        return getattr(hvd, kind.operation)(x, **kind.options)

    def of_group(x):
        return getattr(hvd, f"grouped_{kind.operation}")([2 * x, x], **kind.options)[1]

    return [one, of_group] if kind.operation in GROUPED else [one]


def check_gradients(key):
    """First and second derivatives, forward mode, and vmap."""
    rank, size = hvd.rank(), hvd.size()
    mine, functions = [], []
    for kind in KINDS:
        values = case(kind, size, key)
        for operation in calls(kind):
            x, factor, direction = (
                jnp.asarray(of_all[rank], jnp.complex64)
                for of_all in (values.inputs, values.factors, values.directions)
            )
            square = jnp.asarray(values.squares[rank], jnp.float32)

            def loss(x, operation=operation, factor=factor, square=square):
                y = operation(x)
                return jnp.real(factor * y + square * y * jnp.conj(y) / 2).sum()

            def product(x, direction, loss=loss):
                return jnp.real(direction * jax.grad(loss)(x)).sum()

            functions.append((operation, loss, product))
            mine.append((x, direction, values))

    def everything(arrays):
        return [
            (
                jax.grad(loss)(x),
                jax.grad(product)(x, direction),
                jax.jvp(operation, (x,), (direction,))[1],
                jax.vmap(jax.grad(loss), 1, 1)(jnp.stack([x, x], 1)),
                jax.vmap(operation)(jnp.stack([x, direction])),
            )
            for (operation, loss, product), (x, direction) in zip(functions, arrays, strict=True)
        ]

    results = jax.jit(everything)([(x, direction) for x, direction, _ in mine])
    for result, (_, loss, _), (x, _, values) in zip(results, functions, mine, strict=True):
        gradient, second, tangent, mapped, outputs = result
        of_direction = values.kind.forward(values.directions)[rank]
        close(gradient, values.gradients[rank].conj())
        close(jax.grad(loss)(x), values.gradients[rank].conj())
        close(second, values.second[rank].conj())
        close(tangent, of_direction)
        close(mapped, np.stack([values.gradients[rank].conj()] * 2, 1))
        close(outputs, np.stack([values.outputs[rank], of_direction]))


def test_complex_gradients_match_central_differences(ranks):
    ranks.run(check_gradients, seed())


def check_integers():
    """Integers and bool: the operation runs once, and its tangent and its gradient are those of a constant."""
    rank, size = hvd.rank(), hvd.size()
    numbers = jnp.arange(2 * size, dtype=jnp.int32) + rank
    flags = numbers % 2 == 0
    operations = [
        lambda x: hvd.allreduce(x, op=hvd.Max),
        lambda x: hvd.allgather(x),
        lambda x: hvd.broadcast(x, size - 1),
        lambda x: hvd.alltoall(x),
        lambda x: hvd.grouped_allgather([x, x])[1],
    ]
    weights = jnp.arange(2.0 * size) + 1j

    def weighted(x, w, operation):
        return jnp.abs((operation(x)[: w.size] * w).sum()) ** 2

    def everything(numbers, flags, w):
        found = []
        for operation in operations:
            for x in numbers, flags:
                zeros = np.zeros(x.shape, float0)
                primal, tangent = jax.jvp(operation, (x,), (zeros,))
                assert tangent.dtype == float0
                assert tangent.shape == primal.shape
                of_x, of_w = jax.grad(weighted, (0, 1), allow_int=True)(x, w, operation)
                assert (of_x.dtype, of_x.shape) == (float0, x.shape)
                _, pull = jax.vjp(operation, x)
                assert pull(tangent)[0].dtype == float0
                mapped = jax.vmap(operation, -1, -1)(jnp.stack([x, x[::-1]], -1))
                found.append((operation(x), primal, of_w, mapped, operation(x[::-1])))
        return found

    for compiled in WRAPPERS:
        for output, primal, of_w, mapped, reverse in compiled(everything)(numbers, flags, weights):
            same(primal, output)
            y = np.asarray(output)[: weights.size]
            close(of_w, 2 * y * np.conj((y * np.asarray(weights)).sum()))
            same(mapped, np.stack([output, reverse], -1))


def test_gradients_of_integer_operands(ranks):
    ranks.run(check_integers)


def check_mixed():
    """Trees of differentiable and other arrays, in loops, and with rules of the user's own."""
    rank, size = hvd.rank(), hvd.size()
    total = sum(r + 1 for r in range(size))
    z, count, flag = jnp.full(2, (rank + 1) * (1 + 2j)), jnp.int32(rank + 1), jnp.asarray([True])

    def loss(z, count, flag):
        tree = hvd.allgather({"z": z, "count": count, "flag": flag, "real": jnp.real(z)})
        every = hvd.allreduce([z, count], op=hvd.Sum)
        scale = every[1] + tree["count"].sum() * tree["flag"].sum()
        return (jnp.abs(every[0]) ** 2).sum() + scale * tree["real"].sum()

    scale = total * (1 + size)
    expected = np.full(2, 2 * total * size * (1 - 2j) + scale)  # every rank has the same loss
    for compiled in WRAPPERS:
        close(compiled(jax.grad(loss))(z, count, flag), expected)

    def step(carry, _):
        z, count = hvd.allreduce(carry, op=hvd.Sum)
        return (z / size, count), count

    def looped(z):
        (z, _), counts = lax.scan(step, (z, count), None, length=3)
        return (jnp.abs(z) ** 2).sum() * counts.sum()

    mean, counts = total / size, total * (1 + size + size**2)
    for compiled in WRAPPERS:
        close(compiled(jax.grad(looped))(z), np.full(2, 2 * mean * (1 - 2j) * counts))

    @jax.custom_vjp
    def own(z, count):
        return hvd.allreduce(z) * count

    def back(count, grad):
        return hvd.allreduce(grad) * count, np.zeros((), float0)

    own.defvjp(lambda z, count: (own(z, count), count), back)
    for compiled in WRAPPERS:
        found = compiled(jax.grad(lambda z: jnp.real(own(z, jnp.int32(3))).sum()))(z)
        close(found, np.full(2, 3))
    holomorphic = jax.grad(lambda z: (hvd.allreduce(z) ** 2).sum(), holomorphic=True)(z)
    close(holomorphic, np.full(2, 2 * mean * (1 + 2j)))


def test_gradients_of_mixed_operands(ranks):
    ranks.run(check_mixed)
