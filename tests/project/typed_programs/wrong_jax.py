"""Mistakes in the use of ``horoplug.jax``."""

import jax.numpy as jnp
import optax

import horoplug.jax as hvd

x = jnp.ones(3)
hvd.allreduce(x, op="sum")  # wrong
hvd.allredcue(x)  # wrong
hvd.grouped_allreduce(3)  # wrong
hvd.DistributedOptimizer(3)  # wrong: pyright
hvd.DistributedOptimizer(optax.sgd(0.1)).step()  # wrong: pyright
hvd.broadcast(x)  # wrong
hvd.rank() + ""  # wrong
