"""Train a small convolutional network on Fashion-MNIST with MXNet's Gluon, on one process or several.

    python examples/mxnet/train.py                          # one process
    horovodrun -np 2 python examples/mxnet/train.py         # on two processes

The script is the same for both. Four lines, marked (1) to (4), make it distributed, and each process trains on its
share of the images. The data are Fashion-MNIST, from Debian's package dataset-fashion-mnist or from four files in
--data-dir.
"""

import argparse
import gzip
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import horoplug.mxnet as hvd

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes from a gzipped IDX file, which consists of a magic number with the number of dimensions,
    the dimensions as big-endian int32, and the bytes."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, float32 of shape (count, 1, 28, 28) in 0..1, and their classes, 0..9. ``part``: "train" or "t10k"."""
    try:
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
    except FileNotFoundError as error:
        raise SystemExit(
            f"{error.filename} is missing: install Debian's dataset-fashion-mnist, or give --data-dir."
        ) from None
    return images[:, None].astype(np.float32) / 255, labels.astype(np.float32)


def network() -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 5, strides=2, activation="relu"),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process")
    parser.add_argument("--data-dir", type=Path, default=DEBIAN, help="folder of Fashion-MNIST")
    parser.add_argument("--max-samples", type=int, help="maximum number of training images")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    args = parser.parse_args()

    hvd.init()  # (1) join the job

    images, labels = (part[: args.max_samples] for part in load(args.data_dir, "train"))
    test_images, test_labels = load(args.data_dir, "t10k")
    mx.random.seed(args.seed + hvd.rank())
    net = network()
    net(mx.nd.zeros((1, 1, 28, 28)))  # from which the shapes of the parameters are known

    # (2) average the gradients of all processes, (3) with a learning rate for the larger batch
    options = {"learning_rate": args.lr * hvd.size(), "momentum": 0.9}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options)
    # (4) start with the same parameters
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(f"{len(labels)} images of Fashion-MNIST, {hvd.size()} process(es)", flush=True)
    # All processes shuffle the images in the same way. Each trains on its share, in the same number of batches.
    share = len(labels) // hvd.size()
    for epoch in range(args.epochs):
        order = np.random.default_rng([args.seed, epoch]).permutation(len(labels))
        order = order[hvd.rank() :: hvd.size()][:share]
        total, started = mx.nd.zeros(1), time.perf_counter()
        for start in range(0, share, args.batch_size):
            chosen = order[start : start + args.batch_size]
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images[chosen])), mx.nd.array(labels[chosen]))
            loss.backward()
            trainer.step(len(chosen))
            total += loss.sum()
        mean = hvd.allreduce(total / share, name="loss").asscalar()
        rate = share * hvd.size() / (time.perf_counter() - started)
        mine = slice(hvd.rank(), len(test_labels), hvd.size())
        right = net(mx.nd.array(test_images[mine])).argmax(1) == mx.nd.array(test_labels[mine])
        accuracy = hvd.allreduce(right.sum(), op=hvd.Sum, name="right").asscalar() / len(
            test_labels
        )
        say(
            f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}, test accuracy {accuracy:.2%}, {rate:,.0f} images/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
