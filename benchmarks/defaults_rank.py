"""A rank of defaults.py: trains for some seconds and prints the samples per second of all ranks. It chooses no number
of threads, and uses each framework as its guide shows."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Step = Callable[[], Any]
BATCH = {"mlp": 64, "cnn": 32}
SIZES = (1024, 2048, 2048, 2048, 10)
CHANNELS = (3, 32, 64, 128)
WARM_UP = 10  # steps, also until a plan is installed and programs are compiled


def batch_of(model: str, rank: int) -> tuple[Any, Any]:
    """Inputs, of images with the channels last, and labels."""
    random = np.random.default_rng(rank)
    shape = (SIZES[0],) if model == "mlp" else (32, 32, CHANNELS[0])
    inputs = random.standard_normal((BATCH[model], *shape), dtype=np.float32)
    return inputs, random.integers(10, size=BATCH[model])


def weights_of(model: str) -> list[Any]:
    """Initial weights: matrices, or 3x3 filters (height, width, in, out) and a last matrix."""
    random = np.random.default_rng(7)
    if model == "mlp":
        shapes: list[tuple[int, ...]] = list(itertools.pairwise(SIZES))
    else:
        shapes = [(3, 3, a, b) for a, b in itertools.pairwise(CHANNELS)]
        shapes.append((CHANNELS[-1], 10))
    return [0.02 * random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def torch_step(library: str, model: str) -> tuple[Any, Step]:
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers: list[nn.Module] = []
    if model == "mlp":
        for a, b in itertools.pairwise(SIZES):
            layers += [nn.Linear(a, b), nn.ReLU()]
        layers.pop()
    else:
        for a, b in itertools.pairwise(CHANNELS):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], 10)]
    network: nn.Module = nn.Sequential(*layers)
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    job: Any
    if library == "ddp":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        job = _Group(dist)
        network = nn.parallel.DistributedDataParallel(network)
    else:
        import horoplug.torch as hvd

        hvd.init()
        job = hvd
        optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    inputs, labels = map(torch.from_numpy, batch_of(model, job.rank()))
    if model == "cnn":
        inputs = inputs.permute(0, 3, 1, 2).contiguous()

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(network(inputs), labels)
        loss.backward()
        optimizer.step()

    return job, step


class _Group:
    """What :func:`main` uses of horoplug, for torch.distributed."""

    def __init__(self, dist: Any) -> None:
        self.rank, self.barrier = dist.get_rank, dist.barrier
        self._dist = dist

    def allgather_object(self, value: Any) -> list[Any]:
        found = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(found, value)
        return found


def tensorflow_step(_: str, model: str) -> tuple[Any, Step]:
    import tensorflow as tf

    import horoplug.tensorflow as hvd

    hvd.init()
    weights = [tf.Variable(each) for each in weights_of(model)]
    inputs, labels = map(tf.constant, batch_of(model, hvd.rank()))

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def step() -> None:
        with tf.GradientTape() as tape:
            x = inputs
            for weight in weights[:-1]:
                if model == "mlp":
                    x = tf.nn.relu(x @ weight)
                else:
                    x = tf.nn.max_pool2d(
                        tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME")), 2, 2, "SAME"
                    )
            if model == "cnn":
                x = tf.reduce_mean(x, [1, 2])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ weights[-1])
            loss = tf.reduce_mean(losses)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.01 * gradient)

    return hvd, step


def jax_step(_: str, model: str) -> tuple[Any, Step]:
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    import horoplug.jax as hvd

    hvd.init()
    weights = [jnp.asarray(each) for each in weights_of(model)]
    inputs, labels = map(jnp.asarray, batch_of(model, hvd.rank()))
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.01))
    state: list[Any] = [weights, optimizer.init(weights)]

    def loss(weights: list[Any]) -> Any:
        x = inputs
        for weight in weights[:-1]:
            if model == "mlp":
                x = jax.nn.relu(x @ weight)
            else:
                layout = ("NHWC", "HWIO", "NHWC")
                x = lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=layout)
                window = (1, 2, 2, 1)
                x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, window, window, "SAME")
        if model == "cnn":
            x = x.mean((1, 2))
        logits = x @ weights[-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def update(weights: list[Any], state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    compiled: Any = jax.jit(update)

    def step() -> None:
        state[:] = jax.block_until_ready(compiled(*state))

    return hvd, step


STEPS = {"torch": torch_step, "tensorflow": tensorflow_step, "jax": jax_step}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("horoplug", "ddp"), default="horoplug")
    parser.add_argument("--framework", choices=STEPS, default="torch")
    parser.add_argument("--model", choices=BATCH, default="mlp")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    job, step = STEPS[args.framework](args.library, args.model)
    for _ in range(WARM_UP):
        step()
    job.barrier()
    began = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    slowest = max(job.allgather_object(time.perf_counter() - began))
    steps = max(int(args.seconds / slowest * WARM_UP), 1)  # the same on all ranks
    job.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    rates = job.allgather_object(steps * BATCH[args.model] / (time.perf_counter() - began))
    if job.rank() == 0:
        print(f"samples/s={sum(rates):.1f}", flush=True)


if __name__ == "__main__":
    main()
