import hashlib

import jax
import jax.numpy as jnp
import numpy as np

import horoplug.jax as hvd
from tests.harness.elastic_training import Faults, train


def make():
    draw = np.random.default_rng(1)
    params = {
        name: draw.normal(size=n).astype("float32") for name, n in (("a", (8, 16)), ("b", (16, 1)))
    }
    return params, jax.tree.map(np.zeros_like, params)


def loss(params, step):
    x = jnp.sin(jnp.arange(32.0).reshape(4, 8) * (step + 1))
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x.sum(1, keepdims=True)) ** 2)


def update(params, momenta, step):
    grads = hvd.allreduce(jax.grad(loss)(params, step))
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
    return jax.tree.map(lambda p, m: p - 0.02 * m, params, momenta), momenta


compiled = jax.jit(update, donate_argnums=(0, 1))


def one_step(state):
    faults.at("backward", state.step)
    params, momenta = compiled(state.params, state.momenta, state.step)
    faults.at("update", state.step)
    state.params, state.momenta = params, momenta
    # Unnamed operations of survivors and of their replacements belong together.
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum) == hvd.size()


hvd.init()
faults = Faults(hvd)
params, momenta = jax.tree.map(jnp.asarray, make())
state = hvd.elastic.JaxState(params=params, momenta=momenta, step=0)
train(hvd, faults, state, one_step)

# The reference is computed by NumPy, which has nothing to compile.
params, momenta = make()
for step in range(state.step):
    x = np.sin(np.arange(32, dtype="float32").reshape(4, 8) * (step + 1))
    hidden = np.tanh(x @ params["a"])
    error = (
        hidden @ params["b"] - x.sum(1, keepdims=True)
    ) / 2  # the derivative of the mean of 4 squares
    grads = {"a": x.T @ (error @ params["b"].T * (1 - hidden**2)), "b": hidden.T @ error}
    momenta = {name: 0.9 * momenta[name] + grads[name] for name in params}
    params = {name: params[name] - 0.02 * momenta[name] for name in params}
close = all(np.allclose(state.params[name], params[name], atol=1e-3) for name in params)
leaves = jax.tree.leaves((state.params, state.momenta))
bits = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close)
