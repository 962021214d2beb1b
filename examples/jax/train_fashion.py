"""Train a small network on Fashion-MNIST with JAX and optax, on one process or several.

    python examples/jax/train_fashion.py                         # one process
    horovodrun -np 2 python examples/jax/train_fashion.py        # on two processes

The script is the same for both. Five lines, marked (1) to (5), make it distributed, and each process trains on its
share of the images. The data are Fashion-MNIST, from Debian's package dataset-fashion-mnist or from four files in
--data-dir.
"""

import argparse
import gzip
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import horoplug.jax as hvd

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes from a gzipped IDX file, which consists of a magic number with the number of dimensions,
    the dimensions as big-endian int32, and the bytes."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 of shape (count, 784) in 0..1, and their classes, 0..9. ``part``: "train" or "t10k"."""
    try:
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    except FileNotFoundError as error:
        raise SystemExit(
            f"{error.filename} is missing: install Debian's dataset-fashion-mnist, or give --data-dir."
        ) from None
    return images.reshape(len(images), -1).astype(np.float32) / 255, labels.astype(np.int32)


def network(key: jax.Array, sizes: tuple[int, ...] = (784, 128, 64, 10)) -> list[dict[str, Any]]:
    """The parameters of linear layers."""
    initial = jax.nn.initializers.he_normal()
    shapes = list(pairwise(sizes))
    keys = jax.random.split(key, len(shapes))
    return [
        {"w": initial(k, shape, jnp.float32), "b": jnp.zeros(shape[1])}
        for k, shape in zip(keys, shapes, strict=True)
    ]


def scores(params: list[dict[str, Any]], images: jax.Array) -> jax.Array:
    """Class scores (count, 10) of images (count, 784)."""
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def loss_of(params: list[dict[str, Any]], images: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels)
    return losses.mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--data-dir", type=Path, default=DEBIAN, help="folder of Fashion-MNIST")
    parser.add_argument("--max-samples", type=int, help="maximum number of training images")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    args = parser.parse_args()

    hvd.init()  # (1) join the job

    images, labels = (part[: args.max_samples] for part in load(args.data_dir, "train"))
    test_images, test_labels = load(args.data_dir, "t10k")
    params = network(jax.random.key(args.seed + hvd.rank()))

    # (2) scale the learning rate with the number of images per step
    optimizer = optax.sgd(args.lr * hvd.size(), momentum=0.9)
    # (3) average the gradients of all processes
    optimizer = hvd.DistributedOptimizer(optimizer)
    state = optimizer.init(params)
    # (4) start with the same parameters
    params = hvd.broadcast_parameters(params, root_rank=0)
    # (5) and with the same optimizer state
    state = hvd.broadcast_optimizer_state(state, root_rank=0)

    @jax.jit
    def train_step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def right_answers(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        right = (scores(params, images).argmax(1) == labels).sum()
        return hvd.allreduce(right, op=hvd.Sum)  # over all processes

    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(f"{len(labels)} images of Fashion-MNIST, {hvd.size()} process(es)", flush=True)
    # All processes shuffle the images in the same way. Each trains on its share, in the same number of batches.
    share = len(labels) // hvd.size()
    mine = slice(hvd.rank(), len(test_labels) // hvd.size() * hvd.size(), hvd.size())
    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(len(labels))
        order = order[hvd.rank() :: hvd.size()][:share]
        losses, started = [], time.perf_counter()
        for start in range(0, share, args.batch_size):
            chosen = order[start : start + args.batch_size]
            params, state, loss = train_step(params, state, images[chosen], labels[chosen])
            losses.append(loss)
        loss = hvd.allreduce(jnp.stack(losses).mean())
        rate = share * hvd.size() / (time.perf_counter() - started)
        tested = len(test_labels[mine]) * hvd.size()
        accuracy = int(right_answers(params, test_images[mine], test_labels[mine])) / tested
        say(
            f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, test accuracy {accuracy:.2%}, {rate:,.0f} images/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
