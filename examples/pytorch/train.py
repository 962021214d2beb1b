"""Train a small convolutional network on Fashion-MNIST, on one process or several.

    python examples/pytorch/train.py                         # one process
    horovodrun -np 2 python examples/pytorch/train.py        # on two processes

The script is the same for both. Five lines, marked (1) to (5), make it distributed, and each process trains on its
share of the images. The data are Fashion-MNIST, from Debian's package dataset-fashion-mnist or from four files in
--data-dir. Without these files, the script uses the handwritten digits that come with scikit-learn.
"""

import argparse
import gzip
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import horoplug.torch as hvd

try:
    from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:  # then without a progress bar
    tqdm = None

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@dataclass
class Data:
    """Images, float32 of shape (count, 1, side, side) in 0..1, and their classes, int64 of shape (count,), 0..9."""

    name: str
    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def to(self, device: torch.device) -> "Data":
        """The same on another device."""
        return Data(
            self.name,
            self.images.to(device),
            self.labels.to(device),
            self.test_images.to(device),
            self.test_labels.to(device),
        )


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes from a gzipped IDX file, which consists of a magic number with the number of dimensions,
    the dimensions as big-endian int32, and the bytes. Raises ValueError for another format."""
    content = gzip.decompress(path.read_bytes())
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def fashion_mnist(folder: Path) -> Data:
    def part(prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        pixels = torch.from_numpy(images.astype(np.float32) / 255)
        return pixels.unsqueeze(1), torch.from_numpy(labels.astype(np.int64))

    return Data("Fashion-MNIST", *part("train"), *part("t10k"))


def digits() -> Data:
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise SystemExit(
            "No data: install Debian's dataset-fashion-mnist, pass the folder of its files with --data-dir, or install "
            "scikit-learn."
        ) from None
    found = load_digits()
    images = torch.from_numpy(found.images.astype(np.float32) / 16).unsqueeze(1)
    labels = torch.from_numpy(found.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return Data("digits", images[train], labels[train], images[test], labels[test])


def load(folder: Path | None, limit: int) -> Data:
    """Load the images and labels; ``limit``: maximum number of training images (0: all)."""
    if folder is None and DEBIAN.is_dir():
        folder = DEBIAN
    data = digits() if folder is None else fashion_mnist(folder)
    if limit:
        data.images, data.labels = data.images[:limit], data.labels[:limit]
    return data


class Network(nn.Module):
    """Two convolutions and two linear layers; maps images (count, 1, side, side) to class scores (count, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.AdaptiveMaxPool2d(4)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def batches(count: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Indices of this process's batches. All processes shuffle the images in the same way, and get the same number of
    batches and images."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    share = order[: count - count % hvd.size()][hvd.rank() :: hvd.size()]
    return iter(share.split(size))


def total(*values: float) -> list[float]:
    """Sums over all processes."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum).tolist()


def test(model: nn.Module, data: Data) -> float:
    """Share of the test images that are classified correctly; each process evaluates a part of them."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        guesses = [model(part).argmax(1) for part in data.test_images[mine].split(500)]
    right = (torch.cat(guesses) == data.test_labels[mine]).sum().item()
    return total(right)[0] / len(data.test_labels)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    args: argparse.Namespace,
    epoch: int,
) -> dict[str, float]:
    """One pass over the images; returns loss and images per second."""
    model.train()
    loss_sum, seen, started = 0.0, 0, time.perf_counter()
    steps = list(batches(len(data.labels), args.batch_size, args.seed + epoch))
    if tqdm is not None and hvd.rank() == 0:
        steps = tqdm(steps, desc=f"epoch {epoch + 1}/{args.epochs}", unit="batch", leave=False)
    for chosen in steps:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.images[chosen]), data.labels[chosen])
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(chosen)
        seen += len(chosen)
    rate = seen / (time.perf_counter() - started)
    all_loss, all_seen, all_rate = total(loss_sum, seen, rate)
    return {
        "loss": all_loss / all_seen,
        "images_per_second": all_rate,
        "images_per_second_per_process": all_rate / hvd.size(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--epochs", type=int, default=3, help="passes over the training images")
    add("--batch-size", type=int, default=64, help="images per process and step")
    add("--lr", type=float, default=0.02, help="learning rate of one process")
    add("--data-dir", type=Path, help="folder with the four files of Fashion-MNIST")
    add("--max-samples", type=int, default=0, help="maximum number of training images; 0: all")
    add("--seed", type=int, default=1, help="seed of all random numbers")
    add("--threads", type=int, help="threads per process; default: its share of the cores")
    add("--gpu", action="store_true", help="train on GPUs")
    add("--json", action="store_true", help="print the results as a line of JSON at the end")
    add("--save", type=Path, help="file for the parameters, which the first process writes")
    args = parser.parse_args()

    hvd.init()  # (1) join the other processes

    # Each process uses its own GPU, if the host has enough of them.
    device = torch.device("cpu")
    if args.gpu:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads or max(1, cores // hvd.local_size()))
    torch.manual_seed(args.seed)
    data = load(args.data_dir, args.max_samples).to(device)
    model = Network().to(device)

    # (2) scale the learning rate with the number of images per step
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    # (3) average the gradients of all processes
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # (4) start from the same parameters
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # (5) and from the same optimizer state
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(f"{len(data.labels)} images of {data.name}, {hvd.size()} process(es)", flush=True)
    epochs = []
    for epoch in range(args.epochs):
        result = train(model, optimizer, data, args, epoch)
        result["accuracy"] = test(model, data)
        epochs.append(result)
        say(
            f"epoch {epoch + 1}/{args.epochs}: loss {result['loss']:.4f}, "
            f"test accuracy {result['accuracy']:.2%}, "
            f"{result['images_per_second_per_process']:,.0f} images/s per process, "
            f"{result['images_per_second']:,.0f} in total",
            flush=True,
        )
    if args.save and hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)
    if args.json:
        say(json.dumps({"data": data.name, "processes": hvd.size(), "epochs": epochs}), flush=True)


if __name__ == "__main__":
    main()
