"""Programs of JAX with operations in them."""

import random
import threading

import numpy as np
import pytest

from tests.harness.limits import scaled

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")

jnp, lax = jax.numpy, jax.lax


def mean_of_ranks():
    return sum(range(hvd.size())) / hvd.size()


def check_call_after_program():
    """A call outside of programs waits for the operations of a running program, which this rank reaches late."""
    rank, size = hvd.rank(), hvd.size()
    rounds = 200 if rank == 0 else 1

    @jax.jit
    def program(x):
        late = lax.fori_loop(0, rounds, lambda _, w: jnp.tanh(w @ w), jnp.full((300, 300), x[0]))
        return hvd.allreduce(x + late[0, 0] * 0, op=hvd.Sum)

    # Created first, because JAX creates arrays in order with the computations of programs.
    arrays = jax.block_until_ready([jnp.ones(n) for n in range(2, 6)])
    program(arrays[0])
    for array in arrays[1:]:
        result = program(arrays[0])
        assert hvd.allreduce(array, op=hvd.Sum).tolist() == [size] * len(array)
        assert result.tolist() == [size] * 2


def check_threads(key):
    """Each thread has its own names, and the order of the threads differs between ranks. (XLA runs small programs on
    the calling thread. It runs larger ones one after the other, so that their order matters: see test_failures.py.)"""
    rank, size = hvd.rank(), hvd.size()
    failures = []

    def work(number):
        try:
            step = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"thread{number}"))
            for turn in range(30):
                assert step(jnp.full(3, turn)).tolist() == [turn * size] * 3
                at_once = hvd.allreduce(jnp.full(2, turn), op=hvd.Max, name=f"at once {number}")
                assert at_once.tolist() == [turn] * 2
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    random.Random(key + rank).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(50))
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def check_transforms():
    """vmap, remat, custom derivatives, nested jit, donated arguments and ahead-of-time compilation."""
    rank, size, mean = hvd.rank(), hvd.size(), mean_of_ranks()
    x = jnp.arange(6.0).reshape(3, 2) + rank
    average = np.arange(6.0).reshape(3, 2) + mean
    for compiled in jax.jit, lambda f: f:
        np.testing.assert_allclose(compiled(jax.vmap(hvd.allreduce))(x), average, rtol=1e-6)
        columns = compiled(jax.vmap(lambda c: hvd.allreduce(c * 2), in_axes=1))(x)
        np.testing.assert_allclose(columns, 2 * average.T, rtol=1e-6)
        pairs = compiled(jax.vmap(lambda c, y: hvd.grouped_allreduce([c, y]), in_axes=(0, None)))
        np.testing.assert_allclose(pairs(x, x[0])[1][2], average[0], rtol=1e-6)
        gathered = compiled(jax.vmap(hvd.allgather))(x)
        assert gathered.shape == (3, 2 * size)
        assert gathered[1].tolist() == [2.0 + r + i for r in range(size) for i in range(2)]
        scalars = compiled(jax.vmap(hvd.allgather))(x[:, 0])
        assert scalars.shape == (3, size)
        nested = compiled(jax.vmap(jax.vmap(hvd.allreduce)))(x)
        np.testing.assert_allclose(nested, average, rtol=1e-6)
        with pytest.raises(NotImplementedError, match="cannot be vmapped"):
            compiled(jax.vmap(lambda c: hvd.allreduce(c, op=hvd.Adasum, process_set=alone())))(x)

    remat = jax.checkpoint(lambda x: jnp.sin(hvd.allreduce(jnp.sin(x))).sum())
    plain = lambda x: jnp.sin(hvd.allreduce(jnp.sin(x))).sum()  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(remat))(x), jax.grad(plain)(x), rtol=1e-6)

    @jax.custom_vjp
    def doubled(x):
        return hvd.allreduce(x)

    doubled.defvjp(lambda x: (hvd.allreduce(x), None), lambda _, g: (2 * hvd.allreduce(g),))
    assert (jax.jit(jax.grad(lambda x: doubled(x).sum()))(x) == 2).all()

    donating = jax.jit(lambda x: jax.jit(hvd.allreduce)(x) + 1, donate_argnums=0)
    np.testing.assert_allclose(donating(x + 0), average + 1, rtol=1e-6)
    ahead = jax.jit(hvd.allreduce).lower(x).compile()
    np.testing.assert_allclose(ahead(x), average, rtol=1e-6)
    # Arguments, and values that are used later, are not overwritten.
    before = np.array(x)
    total, again = jax.jit(lambda x: (hvd.allreduce(x, op=hvd.Sum) + x, x * 1))(x)
    np.testing.assert_allclose(total, size * average + before, rtol=1e-6)
    assert (np.asarray(x) == before).all()
    assert (np.asarray(again) == before).all()
    with jax.disable_jit():
        np.testing.assert_allclose(jax.jit(hvd.allreduce)(x), average, rtol=1e-6)


def alone():
    return next((s for s in hvd_sets() if s.included()), hvd.global_process_set)


def hvd_sets():
    from horoplug.common.context import context

    return context.process_sets.values()
