"""Elastic training with JAX: the state of a run, and its recovery after a failed operation."""

import random
import threading

import numpy as np
import pytest

from horoplug.common.elastic import ObjectState
from tests.harness.checks import elastic
from tests.harness.support import ranks_fixture, seed

jax = pytest.importorskip("jax")
hvd = pytest.importorskip("horoplug.jax")
jnp = jax.numpy

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("aa", "ab")


# ---- copies ----------------------------------------------------------------------------------------------------------


def made_up(draw, depth=0):
    """A pytree of arrays and other objects."""
    kind = draw.randrange(9 if depth < 3 else 6)
    shape = tuple(draw.randrange(1, 4) for _ in range(draw.randrange(3)))
    if kind < 2:
        return jnp.asarray(np.random.default_rng(draw.randrange(99)).random(shape), "float32")
    if kind == 2:
        return np.random.default_rng(draw.randrange(99)).integers(0, 9, shape)
    if kind == 3:
        return jax.random.key(draw.randrange(99))
    if kind < 6:
        return draw.choice([None, 1.5, "text", jnp.bfloat16(3)])
    parts = [made_up(draw, depth + 1) for _ in range(draw.randrange(1, 4))]
    return {6: tuple(parts), 7: parts, 8: dict(zip("abc", parts, strict=False))}[kind]


def plain(tree):
    """A pytree of lists and numbers that can be compared."""

    def of_leaf(leaf):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", jax.random.key_data(leaf).tolist()
        if isinstance(leaf, jax.Array | np.ndarray):
            return type(leaf).__name__, str(leaf.dtype), np.asarray(leaf).tolist()
        return leaf

    return jax.tree_util.tree_map(of_leaf, tree)


def destroy(tree):
    """Donate the arrays, as a compiled step does."""
    for leaf in jax.tree_util.tree_leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()
        elif isinstance(leaf, np.ndarray):
            leaf.fill(0)


def check_copies(key):
    draw = random.Random(key)
    for _ in range(30):
        trees = {name: made_up(draw) for name in "xyz"}
        state = hvd.elastic.JaxState(**trees)
        expected = {name: plain(tree) for name, tree in trees.items()}
        for _ in range(2):
            for name in trees:
                destroy(getattr(state, name))
                setattr(state, name, "changed")
            state.restore()
            assert {name: plain(getattr(state, name)) for name in trees} == expected
        state.x = made_up(draw)
        expected["x"] = plain(state.x)
        state.save()
        destroy(state.x)
        state.restore()
        assert plain(state.x) == expected["x"]


def check_references():
    array, numpy_array = jnp.ones(3), np.ones(3)
    state = hvd.elastic.JaxState(donated=False, tree={"a": array, "b": numpy_array})
    state.save()
    numpy_array[0] = 5
    state.tree = None
    state.restore()
    assert state.tree["a"] is array
    assert state.tree["b"].tolist() == [1, 1, 1]


def check_objects():
    objects = {"mixed": {1: [2], "a": {3}}, "order": {"b": 1, "a": 2}, "kind": (1, "x")}
    ours = hvd.elastic.JaxState(**objects)
    theirs = ObjectState(lambda x: x, lambda: 0, **objects)
    for state in ours, theirs:
        state.mixed[1].append(5)
        state.mixed["a"].add(6)
        state.order["c"] = 7
        state.restore()
    for name in objects:
        assert repr(getattr(ours, name)) == repr(getattr(theirs, name))
    assert list(ours.order) == ["b", "a"]


def check_other_errors():
    @hvd.elastic.run
    def train(state):
        raise state.error

    for error in KeyError("mine"), jax.errors.JaxRuntimeError("mine"):
        with pytest.raises(type(error), match="mine"):
            train(hvd.elastic.JaxState(error=error))


@pytest.fixture
def alone(pool):
    """One rank. JAX starts threads, which the process of the tests must not have when it forks."""
    with pool.ranks(1) as job:
        yield job


def test_restored_state_is_that_of_the_last_commit_although_its_arrays_were_donated(alone):
    alone.run(check_copies, seed())


def test_commit_without_donation_keeps_references(alone):
    alone.run(check_references)


def test_objects_are_saved_as_in_object_state(alone):
    alone.run(check_objects)


def test_other_errors_are_raised_unchanged(alone):
    alone.run(check_other_errors)


# ---- jobs ------------------------------------------------------------------------------------------------------------


def check_sync():
    rank = hvd.rank()
    state = hvd.elastic.JaxState(
        params={"w": jnp.full(3, float(rank)), "key": jax.random.key(rank)},
        history=[rank] * (rank + 1),
        table=np.full(2, rank),
        best=None if rank else 0.5,
    )
    state.sync()
    for _ in range(2):
        assert state.params["w"].tolist() == [0.0] * 3
        assert (
            jax.random.key_data(state.params["key"]) == jax.random.key_data(jax.random.key(0))
        ).all()
        assert (state.history, state.table.tolist(), state.best) == ([0], [0, 0], 0.5)
        destroy(state.params)
        state.history.append(5)
        state.restore()


def test_sync_gives_all_ranks_the_state_of_rank_0(ranks):
    ranks.run(check_sync)


def check_run(compiled):
    add = jax.jit(lambda w: w + hvd.allreduce(jnp.ones(1), op=hvd.Sum), donate_argnums=0)

    def step(state):
        state.params = add(state.params)

    elastic.check_run(
        hvd,
        jnp.ones,
        make_state=lambda: hvd.elastic.JaxState(params=jnp.full(1, float(hvd.rank())), step=0),
        step=step,
        value=lambda state: state.params.tolist(),
        compiled=lambda operation: (
            lambda x: jax.block_until_ready((jax.jit(operation) if compiled else operation)(x))
        ),
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.short(failure=True)
def test_run_restores_the_last_commit(ranks, compiled):
    ranks.run(check_run, compiled)


def check_commit_of_a_failed_program():
    """The results of a program may be in the state before JAX raises its failure. They are in no commit."""
    calls = []
    state = hvd.elastic.JaxState(params=jnp.zeros(2), step=0)
    good = jax.jit(lambda w: w + hvd.allreduce(jnp.ones(2)))

    @jax.jit
    def bad(w):
        # Too large for XLA to run it on the calling thread, which would raise the failure at once.
        zeros = 0 * jnp.tanh(jnp.ones((200, 200)) @ jnp.ones((200, 200))).sum()
        return w + hvd.allreduce(jnp.ones(2 + hvd.rank()) + zeros, name="bad")[:2]

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        while state.step < 3:
            state.params = (bad if state.step == 1 and len(calls) == 1 else good)(state.params)
            state.step += 1
            state.commit()

    train(state)
    assert calls == [0, 1]
    assert state.params.tolist() == [3, 3]


def test_failed_program_is_in_no_commit(ranks):
    ranks.run(check_commit_of_a_failed_program)


def check_kept_objects():
    generator = np.random.default_rng(hvd.rank())
    state = hvd.elastic.JaxState(
        params={"w": jnp.zeros(2), "note": hvd.rank()}, generator=generator
    )
    state.sync()
    assert state.params["note"] == 0
    assert state.generator is generator
    first = generator.random()
    assert first == np.random.default_rng(0).random()
    state.restore()
    assert generator.random() == first
    for wrong in (threading.Lock(), [jnp.ones(1), threading.Lock()]):
        with pytest.raises(ValueError, match=r"the attribute 'tools'.*, a lock, cannot be sent"):
            hvd.elastic.JaxState(tools=wrong, step=0).sync()


def test_generators_stay_where_they_are_and_what_cannot_be_pickled_is_one_line(ranks):
    ranks.run(check_kept_objects)
