"""Train a small convolutional network on Fashion-MNIST with a custom training loop, on one process or several.

    python examples/tensorflow/train.py                         # one process
    horovodrun -np 2 python examples/tensorflow/train.py        # on two processes

The script is the same for both. Five lines, marked (1) to (5), make it distributed, and each process trains on its
share of the images. The data are Fashion-MNIST, from Debian's package dataset-fashion-mnist or from four files in
--data-dir.
"""

import argparse
import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

import horoplug.tensorflow as hvd

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes from a gzipped IDX file, which consists of a magic number with the number of dimensions,
    the dimensions as big-endian int32, and the bytes."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 of shape (count, 28, 28, 1) in 0..1, and their classes, int64 of shape (count,), 0..9."""
    if not folder.is_dir():
        raise SystemExit(
            "No data: install Debian's dataset-fashion-mnist, or pass the folder of its files with --data-dir."
        )
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    return images[..., None].astype(np.float32) / 255, labels.astype(np.int64)


def network() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((28, 28, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def batches(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of this process's batches. All processes shuffle the images in the same way, and get the same number of
    batches."""
    order = np.random.default_rng(seed).permutation(count)
    share = order[: count - count % hvd.size()][hvd.rank() :: hvd.size()]
    return (share[start : start + size] for start in range(0, len(share) - size + 1, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one process")
    parser.add_argument("--data-dir", type=Path, default=DEBIAN, help="folder of Fashion-MNIST")
    parser.add_argument("--max-samples", type=int, help="maximum number of training images")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    parser.add_argument("--json", action="store_true", help="print the results as a line of JSON")
    args = parser.parse_args()

    hvd.init()  # (1) join the job

    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())
    images, labels = (array[: args.max_samples] for array in load(args.data_dir, "train"))
    model = network()
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # (2) scale the learning rate with the number of images per step
    optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    # (3) start with the same variables
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def train_step(batch: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        # (4) average the gradients of all processes
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(classes, model(batch, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
        return loss

    @tf.function
    def count_right(batch: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.argmax(model(batch), 1) == classes, tf.float64))

    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(f"{len(labels)} images of Fashion-MNIST, {hvd.size()} process(es)", flush=True)
    test_images, test_labels = load(args.data_dir, "t10k")
    mine = slice(hvd.rank(), None, hvd.size())
    epochs = []
    for epoch in range(args.epochs):
        started, losses = time.perf_counter(), []
        for chosen in batches(len(labels), args.batch_size, args.seed + epoch):
            losses.append(train_step(images[chosen], labels[chosen]))
        seconds = time.perf_counter() - started
        right = count_right(test_images[mine], test_labels[mine])
        result = {
            # (5) average the printed values over all processes
            "loss": float(hvd.allreduce(tf.reduce_mean(losses))),
            "accuracy": float(hvd.allreduce(right, op=hvd.Sum)) / len(test_labels),
            "images_per_second": len(losses) * args.batch_size * hvd.size() / seconds,
        }
        epochs.append(result)
        say(
            f"epoch {epoch + 1}/{args.epochs}: loss {result['loss']:.4f}, test accuracy {result['accuracy']:.2%}, "
            f"{result['images_per_second']:,.0f} images/s",
            flush=True,
        )
    if args.json:
        say(json.dumps({"processes": hvd.size(), "epochs": epochs}), flush=True)


if __name__ == "__main__":
    main()
