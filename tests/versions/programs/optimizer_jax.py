"""Training with JAX and optax on all ranks equals training on one process with the data of all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import Report

import horoplug.jax as hvd

STEPS, ROWS = 5, 12
hvd.init()
check = Report(hvd.rank())
inputs = np.random.default_rng(1).normal(size=(STEPS, ROWS, 4)).astype(np.float32)
mine = np.split(inputs, hvd.size(), axis=1)[hvd.rank()]


def parameters():
    first, second = jax.random.split(jax.random.PRNGKey(2))
    return {"a": jax.random.normal(first, (4, 8)), "b": jax.random.normal(second, (8, 2))}


def loss(params, batch):
    return jnp.square(jnp.tanh(batch @ params["a"]) @ params["b"]).mean()


def train(optimizer, batches, decorate, gradient=jax.grad) -> np.ndarray:
    params = parameters()
    state = optimizer.init(params)

    def step(params, state, batch):
        updates, state = optimizer.update(gradient(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    step = decorate(step)
    for batch in batches:
        params, state = step(params, state, batch)
    return np.concatenate([np.asarray(params[name]).ravel() for name in "ab"])


def compare(found: np.ndarray, alone: np.ndarray) -> None:
    assert len(set(hvd.allgather_object(found.tobytes()))) == 1, "the ranks differ"
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)


def same(function):
    return function


OPTIMIZERS = {"sgd": lambda: optax.sgd(0.1, momentum=0.9), "adam": lambda: optax.adam(0.01)}
for name, make in OPTIMIZERS.items():
    for way, decorate in {"compiled": jax.jit, "not compiled": same}.items():
        with check(f"DistributedOptimizer of {name}, {way}"):
            found = train(hvd.DistributedOptimizer(make()), mine, decorate)
            compare(found, train(make(), inputs, decorate))
with check("distributed_grad"):
    found = train(OPTIMIZERS["sgd"](), mine, jax.jit, hvd.distributed_grad)
    compare(found, train(OPTIMIZERS["sgd"](), inputs, jax.jit))
with check("backward_passes_per_step"):
    halves = np.concatenate(np.split(mine, 2, axis=1), axis=1).reshape(2 * STEPS, -1, 4)
    wrapped = hvd.DistributedOptimizer(optax.sgd(0.05), backward_passes_per_step=2)
    compare(train(wrapped, halves, jax.jit), train(optax.sgd(0.1), inputs, jax.jit))
with check("broadcast_parameters and broadcast_optimizer_state"):
    params = hvd.broadcast_parameters({"x": jnp.full(3, hvd.rank())}, root_rank=1)
    assert params["x"].tolist() == [1, 1, 1]
    state = hvd.broadcast_optimizer_state(OPTIMIZERS["adam"]().init(parameters()), root_rank=0)
    assert jax.tree_util.tree_leaves(state)
with check("scan and cond"):

    @jax.jit
    def program(x):
        def body(total, part):
            return total + hvd.allreduce(part, op=hvd.Sum, name="in.scan"), None

        total, _ = jax.lax.scan(body, jnp.zeros(3), x)
        add = lambda y: hvd.allreduce(y, op=hvd.Sum, name="in.cond")  # noqa: E731
        return jax.lax.cond(total[0] > 0, add, same, total)

    expected = 4 * hvd.size() ** 2
    assert program(jnp.ones((4, 3))).tolist() == [expected] * 3
with check("gradient of allreduce"):
    function = lambda x: (hvd.allreduce(x * (hvd.rank() + 1)) * 2).sum()  # noqa: E731
    gradient = np.asarray(jax.jit(jax.grad(function))(jnp.ones(3)))
    assert gradient.tolist() == [2.0 * (hvd.rank() + 1)] * 3, gradient
with check("vmap"):
    found = jax.vmap(lambda row: hvd.allreduce(row, op=hvd.Sum))(jnp.ones((4, 3)))
    assert np.asarray(found).tolist() == [[hvd.size()] * 3] * 4
check.finish()
