"""DistributedOptimizer and distributed gradients: training on N ranks equals training on one with the whole batch."""

import numpy as np
import pytest

from tests.harness.support import ranks_fixture, seed

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
hvd = pytest.importorskip("horoplug.jax")
jnp = jax.numpy

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("ab")

STEPS, ROWS = 6, 12


def parameters(key):
    random = np.random.default_rng(key)

    def layer(inputs, outputs):
        return {
            "w": jnp.asarray(random.normal(size=(inputs, outputs)) / 3, jnp.float32),
            "b": jnp.zeros(outputs),
        }

    return {"first": layer(5, 8), "second": layer(8, 2), "unused": jnp.ones(3)}


def loss(params, x):
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return ((hidden @ params["second"]["w"] + params["second"]["b"] - 1) ** 2).mean()


def batches(key):
    random = np.random.default_rng([key, 1])
    return jnp.asarray(random.normal(size=(STEPS, ROWS, 5)), jnp.float32)


def share(x):
    return x.reshape(hvd.size(), -1, 5)[hvd.rank()]


def alone(make, key, passes=1, factor=1.0):
    """The parameters after training in one process. ``passes``: the number of batches whose gradients one step sums."""
    params, optimizer = parameters(key), make()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, xs):
        gradients = jax.grad(lambda p: factor * sum(loss(p, x) for x in xs))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    data = batches(key)
    for start in range(0, STEPS, passes):
        params, state = step(params, state, list(data[start : start + passes]))
    return params


def distributed(optimizers, key):
    """The parameters after training on this rank's part of each batch, from different initial parameters. One program
    contains all optimizers, which saves compilation time."""
    params = hvd.broadcast_parameters(parameters(key + hvd.rank()), root_rank=0)
    states = [o.init(params) for o in optimizers]
    states = hvd.broadcast_optimizer_state(states, root_rank=0)

    @jax.jit
    def step(models, states, x):
        results = []
        for optimizer, params, state in zip(optimizers, models, states, strict=True):
            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            results.append((optax.apply_updates(params, updates), state))
        return tuple(zip(*results, strict=True))

    models = [params] * len(optimizers)
    for x in batches(key):
        models, states = (list(each) for each in step(models, states, share(x)))
    return models


def equal(params, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-6}
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    assert all(other == bits for other in hvd.allgather_object(bits)), "ranks have different bits"


def momentum():
    return optax.sgd(0.1, momentum=0.9)


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=1e-3))


def check_optimizer(key):
    expected = alone(momentum, key)
    cases = [
        {},
        {},  # another model of the same shapes
        {"groups": 2},
        {"groups": 100},
        {"groups": [["['first']['w']", "['second']['b']"], ["['unused']"]]},
        {"gradient_predivide_factor": 2.0},
    ]
    for params in distributed([hvd.DistributedOptimizer(momentum(), **c) for c in cases], key):
        equal(params, expected)
    optimizers = [
        hvd.DistributedOptimizer(momentum(), op=hvd.Sum),
        hvd.DistributedOptimizer(momentum(), compression=hvd.Compression.bf16),
        hvd.DistributedOptimizer(momentum(), compression=hvd.Compression.fp16),
        hvd.DistributedOptimizer(clipped()),
        # Both the wrapped optimizer and the outer one get the averages.
        optax.chain(
            hvd.DistributedOptimizer(optax.clip_by_global_norm(0.5)),
            optax.adamw(1e-2, weight_decay=1e-3),
        ),
    ]
    summed, *rounded, inside, outside = distributed(optimizers, key)
    equal(summed, alone(momentum, key, factor=hvd.size()))
    for params in rounded:
        equal(params, expected, rtol=0.05, atol=0.02)
    for params in inside, outside:
        equal(params, alone(clipped, key), rtol=1e-3)
    plateau = hvd.DistributedOptimizer(optax.contrib.reduce_on_plateau(patience=1))
    state = plateau.init(expected)
    updates, _ = jax.jit(plateau.update)(expected, state, value=jnp.float32(1))
    equal(updates, expected)  # it received its extra argument


@pytest.mark.short
def test_optimizer_equals_training_on_one_rank(ranks):
    ranks.run(check_optimizer, seed())


def check_passes(key):
    """Several gradients for each step, with and without jit."""

    def optimizer(average):
        return hvd.DistributedOptimizer(
            momentum(), backward_passes_per_step=3, average_aggregated_gradients=average
        )

    summed, averaged = distributed([optimizer(False), optimizer(True)], key)
    equal(summed, alone(momentum, key, passes=3))
    equal(averaged, alone(momentum, key, passes=3, factor=1 / 3))
    for update in (one := optimizer(True)).update, jax.jit(one.update):
        state = one.init(jnp.ones(2))
        for n in range(6):
            updates, state = update(jnp.full(2, n + hvd.rank(), jnp.float32), state)
            # sgd: -0.1 times the mean of 0, 1, 2 or of 3, 4, 5, plus the mean rank 0.5, plus 0.9 times the last update.
            expected = {2: -0.1 * 1.5, 5: -0.1 * (4.5 + 0.9 * 1.5)}.get(n, 0.0)
            np.testing.assert_allclose(updates, [expected] * 2, rtol=1e-5)
    # Passes in between change nothing and do not communicate.
    optimizer = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
    params = parameters(key)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    if hvd.rank() == 0:
        updates, state = update(params, state)
        assert not any(u.any() for u in jax.tree.leaves(updates))
    hvd.barrier()
    if hvd.rank() != 0:
        updates, state = update(params, state)
    updates, state = update(params, state)
    equal(updates, jax.tree.map(lambda p: -0.2 * p, params))
    assert int(state.passes) == 0


def check_multi_steps():
    """As its refusal advises: MultiSteps around the distributed optimizer reduces in every second step only."""
    rank, size = hvd.rank(), hvd.size()
    optimizer = optax.MultiSteps(hvd.DistributedOptimizer(optax.sgd(1.0)), 2)
    w = jnp.zeros(2)
    state = optimizer.init(w)
    for n in range(4):
        updates, state = jax.jit(optimizer.update)(jnp.full(2, n + rank + 0.5), state, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(w, np.full(2, -(1 + 3 + size - 1)), rtol=1e-6)


def test_backward_passes_per_step(ranks):
    ranks.run(check_passes, seed())
    ranks.run(check_multi_steps)


def check_gradients(key):
    """distributed_value_and_grad and distributed_grad, compared with jax.value_and_grad."""
    params, x = parameters(key), batches(key)[0]
    value, expected = jax.value_and_grad(loss)(params, x)
    mine = loss(params, share(x))
    for compiled in jax.jit, lambda f: f:
        got, gradients = compiled(hvd.distributed_value_and_grad(loss))(params, share(x))
        np.testing.assert_allclose(got, mine, rtol=1e-5)
        np.testing.assert_allclose(hvd.allreduce(got), value, rtol=1e-5)
        equal(gradients, expected)
        equal(
            compiled(hvd.distributed_grad(loss, op=hvd.Sum, groups=3))(params, share(x)),
            jax.tree.map(lambda g: g * hvd.size(), expected),
        )

        def with_aux(x, scale, params):
            return scale * loss(params, x), {"scale": scale}

        both = hvd.distributed_grad(with_aux, argnums=(1, 2), has_aux=True)
        (by_scale, by_params), aux = compiled(both)(share(x), 2.0, params)
        np.testing.assert_allclose(by_scale, value, rtol=1e-5)
        equal(by_params, jax.tree.map(lambda g: 2 * g, expected))
        assert float(aux["scale"]) == 2.0


@pytest.mark.short
def test_distributed_gradients(ranks):
    ranks.run(check_gradients, seed())


def check_sets():
    """Ranks outside of the process set keep their gradients and do not communicate."""
    rank = hvd.rank()
    some = hvd.add_process_set([0])
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), process_set=some)
    gradients = {"w": jnp.full(3, rank, jnp.float32)}
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(gradients))
    assert updates["w"].tolist() == [-rank] * 3
    hvd.remove_process_set(some)


def test_ranks_outside_of_the_set_keep_gradients(ranks):
    ranks.run(check_sets)


def test_invalid_arguments_raise():
    sparse = pytest.importorskip("jax.experimental.sparse")
    adam = optax.adam(1e-3)
    for wrong, text in ((0.1, "float"), (None, "None"), (optax.adam, "function")):
        with pytest.raises(TypeError, match=f"takes an optimizer of optax, got {text}"):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(TypeError, match=r"MultiSteps.*; wrap the optimizer inside of it"):
        hvd.DistributedOptimizer(optax.MultiSteps(adam, 2))
    with pytest.raises(TypeError, match="compression= takes Compression"):
        hvd.DistributedOptimizer(adam, compression="bf16")
    with pytest.raises(ValueError, match="positive"):
        hvd.DistributedOptimizer(adam, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedOptimizer(adam, op=hvd.Sum, gradient_predivide_factor=2.0)
    for groups in 0, -1, True, "w", [["w"], 3]:
        with pytest.raises(ValueError, match="groups takes"):
            hvd.DistributedOptimizer(adam, groups=groups)
    hvd.init()
    try:
        wrong = hvd.DistributedOptimizer(adam, groups=[["['x']"]])
        with pytest.raises(
            ValueError, match=r"groups names \['x'\], but the gradients are \['w'\]"
        ):
            wrong.update({"w": jnp.ones(2)}, wrong.init({"w": jnp.ones(2)}))
        # The leaves of a sparse gradient are its values and its indices.
        table = {"w": sparse.BCOO.fromdense(jnp.eye(3))}
        right = hvd.DistributedOptimizer(adam)
        with pytest.raises(TypeError, match=r"got a BCOO of shape \(3, 3\); use its todense"):
            right.update(table, right.init({"w": jnp.ones([3, 3])}))
        for function in (hvd.allreduce, hvd.allgather, jax.jit(hvd.allreduce)):
            with pytest.raises(TypeError, match=r"all[a-z]+ takes dense arrays, got a BCOO"):
                function(table)
    finally:
        hvd.shutdown()
