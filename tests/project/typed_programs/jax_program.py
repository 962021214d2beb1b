"""``horoplug.jax``: the optimizer, gradients, operations, elastic training."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from typing_extensions import assert_type

import horoplug.jax as hvd

Parameters = dict[str, jax.Array]


def loss(params: Parameters, x: jax.Array) -> jax.Array:
    return jnp.sum(params["w"] * x)


def train(params: Parameters, x: jax.Array) -> Parameters:
    hvd.init()
    assert_type(hvd.rank(), int)
    optimizer = hvd.DistributedOptimizer(
        optax.adam(1e-3), compression=hvd.Compression.fp16, op=hvd.Average, groups=2
    )
    assert_type(optimizer, optax.GradientTransformationExtraArgs)
    params = hvd.broadcast_parameters(params, root_rank=0)
    assert_type(params, Parameters)
    state = hvd.broadcast_optimizer_state(optimizer.init(params), root_rank=0)
    updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
    value, gradients = hvd.distributed_value_and_grad(loss, op=hvd.Sum)(params, x)
    print(value, gradients, hvd.distributed_grad(loss)(params, x), updates)
    return params


def operations(x: jax.Array) -> None:
    hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.bf16)
    hvd.allreduce({"a": x, "b": [x, x]}, name="tree", prescale_factor=2)
    hvd.grouped_allreduce([x, x], average=False)
    hvd.allgather(x)
    hvd.broadcast(x, root_rank=0)
    hvd.alltoall(x, splits=[1, 2])
    hvd.reducescatter(x, op=hvd.Sum)
    hvd.grouped_allgather([x])
    hvd.grouped_reducescatter([x])
    hvd.barrier(hvd.add_process_set([0, 1]))
    assert_type(hvd.join(), int)
    assert_type(hvd.broadcast_object({"epoch": 1}), Any)
    assert_type(hvd.allgather_object("a"), list[Any])


@hvd.elastic.run
def train_elastic(state: hvd.elastic.JaxState, steps: int) -> int:
    while state.step < steps:
        state.step += 1
        state.commit()
    return steps


def elastic(params: Parameters) -> None:
    state = hvd.elastic.JaxState(params=params, step=0, donated=False)
    assert_type(train_elastic(state, steps=10), int)
