"""Train a small convolutional network on Fashion-MNIST in the executors of Spark.

    python examples/spark/train_fashion.py                                 # two processes on this machine
    spark-submit --master yarn --num-executors 4 examples/spark/train_fashion.py --num-proc 4

The images are a DataFrame. Spark spreads its rows over the processes, and each trains on its part; the driver only gets
the results. The data are Fashion-MNIST, from Debian's package dataset-fashion-mnist or from four files in --data-dir.
"""

import argparse
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession

import horoplug.spark

SIDE = 28  # pixels


def rows(folder: Path, prefix: str, limit: int) -> Iterator[tuple[bytearray, int]]:
    """Images, as bytes, and their classes, 0..9. ``limit``: maximum number; 0: all."""
    images = gzip.decompress((folder / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8:]
    for number, label in enumerate(labels[: limit or None]):
        yield bytearray(images[number * SIDE**2 : (number + 1) * SIDE**2]), label


def frame(spark: SparkSession, folder: Path, prefix: str, limit: int) -> DataFrame:
    return spark.createDataFrame(rows(folder, prefix, limit), "image binary, label int")


def train(
    batches: Iterable[Any], test: list[tuple[bytearray, int]], args: argparse.Namespace
) -> dict[str, float]:
    """Runs on each process. ``batches``: ``pyarrow.RecordBatch`` es with this process's rows, which arrive while Spark
    computes them; ``test``: the rows to test with. Returns loss and accuracy after the last epoch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import horoplug.torch as hvd

    def tensors(images: Iterable[bytes], labels: Iterable[int]) -> tuple[torch.Tensor, ...]:
        pixels = np.frombuffer(b"".join(images), np.uint8).reshape(-1, 1, SIDE, SIDE)
        return torch.tensor(pixels / np.float32(255)), torch.tensor([*labels])

    hvd.init()  # (1) join the other processes
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    # (2) scale the learning rate, (3) average the gradients, (4) start from the same parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    kept = []

    def first_epoch() -> Iterator[tuple[torch.Tensor, ...]]:
        for batch in batches:
            columns = batch.to_pydict()
            kept.append(tensors(columns["image"], columns["label"]))
            yield kept[-1]

    for epoch in range(args.epochs):
        model.train()
        losses = []
        for images, labels in first_epoch() if epoch == 0 else kept:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if epoch > 0:  # (5) the batches of the first epoch do this themselves
            hvd.join()
        model.eval()
        images, labels = tensors(*zip(*test[hvd.rank() :: hvd.size()], strict=True))
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).sum()
        sums = torch.tensor([right, len(labels), sum(losses), len(losses)], dtype=torch.float64)
        right, count, loss_sum, steps = hvd.allreduce(sums, op=hvd.Sum).tolist()
        result = {"loss": loss_sum / steps, "accuracy": right / count}
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: {result}", flush=True)
    return result


def main(arguments: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--num-proc", type=int, default=2, help="number of processes")
    add("--epochs", type=int, default=3, help="passes over the training images")
    add("--batch-size", type=int, default=64, help="images per process and step")
    add("--lr", type=float, default=0.02, help="learning rate of one process")
    add("--data-dir", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    add("--max-samples", type=int, default=0, help="maximum number of training images; 0: all")
    add("--seed", type=int, default=1, help="seed of the parameters")
    args = parser.parse_args(arguments)
    spark = SparkSession.builder.appName("Fashion-MNIST").getOrCreate()
    return horoplug.spark.run_on_dataframe(
        frame(spark, args.data_dir, "train", args.max_samples),
        train,
        ([*rows(args.data_dir, "t10k", 2000)], args),
        num_proc=args.num_proc,
        batch_size=args.batch_size,
    )


if __name__ == "__main__":
    print(main()[0])
