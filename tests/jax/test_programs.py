"""Operations in compiled programs: order, control flow, threads, transformations and gradients."""

import random

import numpy as np
import pytest

from tests.harness.checks.jax_programs import (
    check_call_after_program,
    check_threads,
    check_transforms,
    mean_of_ranks,
)
from tests.harness.support import ranks_fixture, seed

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")

jnp, lax = jax.numpy, jax.lax

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aab")


@pytest.fixture
def several(ranks):
    """A job of more than one rank: with a single rank no order can differ."""
    return ranks if ranks.size > 1 else pytest.skip("needs several ranks")


# ---- order ----------------------------------------------------------------------------------------------------------


def check_independent(key):
    """Many operations without names that XLA could run in any order: the ranks match them by their order alone. Each
    has its own shape, so that a wrong match is an error, and the computation before it takes a different time on each
    rank."""
    rank, size = hvd.rank(), hvd.size()
    order = random.Random(key)
    kinds = [order.choice(["allreduce", "allgather", "broadcast"]) for _ in range(30)]
    work = random.Random(key + rank)
    rounds = [work.randrange(4) for _ in kinds]

    @jax.jit
    def program(xs, w):
        outputs = []
        for i, (kind, x) in enumerate(zip(kinds, xs, strict=True)):
            busy = x
            for _ in range(rounds[i]):
                busy = jnp.tanh(busy @ w) + x
            x = busy[: i + 1, 0] * 0 + x[: i + 1, 0]
            if kind == "allreduce":
                outputs.append(hvd.allreduce(x, op=hvd.Sum))
            elif kind == "allgather":
                outputs.append(hvd.allgather(x))
            else:
                outputs.append(hvd.broadcast(x, size - 1))
        return outputs

    rows = 64 * (1 + rank)  # so that all ranks have different programs
    xs = [jnp.full((rows, 64), i + rank, jnp.float32) for i in range(len(kinds))]
    for _ in range(5):
        outputs = program(xs, jnp.eye(64))
    for i, (kind, output) in enumerate(zip(kinds, outputs, strict=True)):
        expected = {
            "allreduce": [i * size + sum(range(size))] * (i + 1),
            "allgather": [i + r for r in range(size) for _ in range(i + 1)],
            "broadcast": [i + size - 1] * (i + 1),
        }[kind]
        assert output.tolist() == expected


def test_independent_operations_match_by_order(several):
    several.run(check_independent, seed())


def check_unused():
    """Results that are unused on one rank or on all, and operations that look the same."""
    rank, size = hvd.rank(), hvd.size()

    @jax.jit
    def program(x):
        first = hvd.allreduce(x, op=hvd.Sum)
        second = hvd.allreduce(x, op=hvd.Sum)
        gathered = hvd.allgather(x[:2])
        return (x, second) if rank % 2 else (first, gathered)

    for _ in range(3):
        result = program(jnp.ones(3))[rank % 2]
        assert result.tolist() == [size] * 3


def test_unused_results_are_not_dropped(ranks):
    ranks.run(check_unused)


def check_back_to_back():
    """Programs that are dispatched before the results of the previous ones are ready, and calls outside of programs in
    between."""
    rank, size = hvd.rank(), hvd.size()
    busy = jnp.ones((300 * (1 + 2 * (rank == 0)), 300))  # rank 0 takes longer

    def program(x, busy, n):
        return hvd.allreduce(x[:n] @ x[:n].T + jnp.tanh(busy @ busy.T).sum() * 0, op=hvd.Sum)

    steps = [jax.jit(lambda x, busy, n=n: program(x, busy, n)) for n in range(20, 30)]
    x = jnp.ones((400, 40))
    results = []
    for turn in range(4):
        for n, step in enumerate(steps, 20):
            results.append((n, step(x, busy)))
            if n % 5 == rank:
                jax.block_until_ready(results[-1])
            if n % 4 == 0:  # outside of programs, and matched by order like those inside
                assert hvd.allreduce(np.ones(n + turn), op=hvd.Sum).shape == (n + turn,)
                assert hvd.broadcast_object(n, 0) == n
    hvd.barrier()
    for n, result in results:
        assert result.shape == (n, n)
        assert float(result[0, 0]) == 40 * size


def test_programs_without_waiting_in_between(several):
    several.run(check_back_to_back)


def test_call_waits_for_running_program(several):
    several.run(check_call_after_program)


def check_retraced():
    """A single rank traces a program again, and ranks trace programs in different orders."""
    rank, size = hvd.rank(), hvd.size()
    total = jax.jit(lambda x: hvd.allreduce(x.sum(keepdims=True), op=hvd.Sum))
    other = jax.jit(lambda x: hvd.allgather(x[:2]))
    for step in (total, other) if rank % 2 else (other, total):
        step.lower(jnp.ones(9)).compile()
    for n in range(6):
        rows = 4 + (n if rank == 0 else 0)  # such as a smaller last batch
        assert total(jnp.ones(rows)).tolist() == [4 * size + (n if size > 0 else 0)]
        assert other(jnp.ones(rows)).shape == (2 * size,)


def test_ranks_trace_differently(several):
    several.run(check_retraced)


def test_threads_with_own_names(several):
    several.run(check_threads, seed())


# ---- control flow ---------------------------------------------------------------------------------------------------


def check_control_flow():
    rank, mean = hvd.rank(), mean_of_ranks()
    x = jnp.full(3, rank, jnp.float32)

    def body(carry, i):
        carry = hvd.allreduce(carry) + i
        return carry, hvd.allgather(carry[:1])

    last, each = jax.jit(lambda x: lax.scan(body, x, jnp.arange(5.0)))(x)
    np.testing.assert_allclose(last, np.full(3, mean + 10), rtol=1e-6)
    assert each.shape == (5, hvd.size())

    def more(state):
        # An operation in the condition.
        return hvd.allreduce(state[0], op=hvd.Max) < 7

    def step(state):
        return state[0] + 1, hvd.allreduce(state[1], op=hvd.Sum, name="in a loop")

    count, total = jax.jit(lambda n, x: lax.while_loop(more, step, (n, x)))(
        jnp.int32(0), jnp.float32(1)
    )
    assert (int(count), float(total)) == (7, hvd.size() ** 7)

    @jax.jit
    def branch(flag, x):
        before = hvd.allreduce(x)
        inside = lax.cond(flag, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: before * 2)
        return inside, hvd.allreduce(x, op=hvd.Max)

    for flag in True, False, True:
        inside, after = branch(flag, x)
        expected = mean * hvd.size() if flag else 2 * mean
        np.testing.assert_allclose(inside, np.full(3, expected), rtol=1e-6)
        assert after.tolist() == [hvd.size() - 1] * 3
    looped = jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: hvd.allreduce(c) + i, x))(x)
    np.testing.assert_allclose(looped, np.full(3, mean + 3), rtol=1e-6)
    mapped = jax.jit(lambda x: lax.map(lambda c: hvd.allreduce(c, op=hvd.Sum), x))(jnp.arange(4.0))
    assert mapped.tolist() == [i * hvd.size() for i in range(4)]


def test_loops_and_branches(ranks):
    ranks.run(check_control_flow)


def check_transforms_with_sets():
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size() if hvd.size() > 1 else 0)]
    try:
        check_transforms()
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


def test_jax_transformations(ranks):
    ranks.run(check_transforms_with_sets)


# ---- gradients ------------------------------------------------------------------------------------------------------


def check_gradient(function, expected, x):
    """Compares the gradient at x with `expected`, with and without jit."""
    for gradient in jax.jit(jax.grad(function)), jax.grad(function):
        np.testing.assert_allclose(gradient(x), expected, rtol=1e-5, atol=1e-6)


def check_gradients():
    """Horovod's rules: the loss is the average of the ranks' losses."""
    rank, size = hvd.rank(), hvd.size()
    x = jnp.arange(2.0 * size).reshape(size, 2) + rank
    weight = (jnp.arange(2.0 * size).reshape(size, 2) + 1) * (rank + 1)
    of_all = [np.asarray(weight) / (rank + 1) * (r + 1) for r in range(size)]
    mean = sum(of_all) / size
    check_gradient(lambda x: (hvd.allreduce(x) * weight).sum(), mean, x)
    check_gradient(lambda x: (hvd.allreduce(x, op=hvd.Sum) * weight).sum(), mean * size, x)
    scaled = lambda x: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=2.0)  # noqa: E731
    check_gradient(lambda x: (scaled(x) * weight).sum(), 6 * mean, x)
    check_gradient(
        lambda x: sum((y * weight).sum() for y in hvd.grouped_allreduce([x, 2 * x], name="g")),
        3 * mean,
        x,
    )
    check_gradient(
        lambda x: (hvd.allgather(x[:1]) * weight).sum(),
        np.eye(size)[:, :1] * 0 + own_row_first(mean),
        x,
    )
    root = mean if rank == size - 1 else np.zeros_like(mean)
    check_gradient(lambda x: (hvd.broadcast(x, size - 1) * weight).sum(), root, x)
    back = np.stack([of_all[r][rank] for r in range(size)])
    check_gradient(lambda x: (hvd.alltoall(x) * weight).sum(), back, x)
    for op, factor in (hvd.Average, 1), (hvd.Sum, size):
        joined = np.concatenate(
            [np.asarray(weight[:1]) / (rank + 1) * (r + 1) for r in range(size)]
        )
        check_gradient(
            lambda x, op=op: (hvd.reducescatter(x, op=op) * weight[:1]).sum(), factor * joined, x
        )
    # Rows that cannot be divided evenly, several rows per rank, and rows that are not sent.
    rows = jnp.ones((2 * size + 1, 2)) * (rank + 1)
    share = hvd.reducescatter(rows, op=hvd.Sum).shape[0]
    check_gradient(
        lambda x: (hvd.reducescatter(x, op=hvd.Sum) * jnp.arange(1.0, share + 1)[:, None]).sum(),
        size
        * np.concatenate([np.arange(1, n + 1) for n in shares(2 * size + 1)])[:, None]
        * np.ones((1, 2)),
        rows,
    )
    splits = [1] * size
    kept = np.ones((2 * size + 1, 2))
    kept[size:] = 0
    check_gradient(lambda x: hvd.alltoall(x, splits)[0].sum(), kept, rows)

    # Forward mode, second derivatives, loops, branches, and integer operands.
    _, tangent = jax.jvp(lambda x: hvd.allreduce(x, name="j"), (x,), (weight,))
    np.testing.assert_allclose(tangent, mean, rtol=1e-6)
    check_gradient(
        jax.grad(lambda y: (hvd.allreduce(jnp.full(2, y)) ** 3).sum()), 12.0, jnp.float32(1)
    )
    looped = lambda x: lax.scan(lambda c, _: (hvd.allreduce(c) * 2, None), x, None, length=3)[0]  # noqa: E731
    check_gradient(lambda x: (looped(x) * weight).sum(), 8 * mean, x)
    chosen = lambda x: lax.cond(x.sum() < -1, lambda: x, lambda: hvd.allreduce(x) * 3)  # noqa: E731
    check_gradient(lambda x: (chosen(x) * weight).sum(), 3 * mean, x)
    counted = lambda x: (x * hvd.allreduce(jnp.int32(2), op=hvd.Sum)).sum()  # noqa: E731
    check_gradient(counted, np.full((size, 2), 2 * size), x)
    for op in hvd.Min, hvd.Max, hvd.Product:
        with pytest.raises(
            NotImplementedError, match=r"has no gradient; use jax\.lax.stop_gradient"
        ):
            jax.grad(lambda x, op=op: hvd.allreduce(x, op=op).sum())(x)

    # A metric besides the loss, which is not differentiated and which rank 0 does not return.
    def loss(x):
        metric = hvd.allreduce(x.sum())
        return (hvd.allreduce(x) * weight).sum(), metric if rank else None

    got, _ = jax.jit(jax.grad(loss, has_aux=True))(x)
    np.testing.assert_allclose(got, mean, rtol=1e-6)


def own_row_first(mean):
    """An array whose first row is this rank's row of the average, and zero elsewhere."""
    result = np.zeros_like(mean)
    result[0] = mean[hvd.rank()]
    return result


def shares(rows):
    return [len(part) for part in np.array_split(np.arange(rows), hvd.size())]


def test_gradients_follow_horovod_rules(ranks):
    ranks.run(check_gradients)
